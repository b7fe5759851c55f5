// Copies pieces of memory, wherever they lie: one block of threads takes a piece at a time, for drivers without cuMemcpyBatchAsync.
//
// What it is: the source of native/device/gather_kernel.h, which scripts/make-gather-kernel makes of it. What it is not: part of any
// build. Each byte is written once, by the widest word that source and target allow; nothing outside a piece is touched.
struct CopyDescriptor {
  unsigned long long target;
  unsigned long long source;
  unsigned long long size;
};

template <typename Word>
__device__ void copy_words(unsigned long long target, unsigned long long source, unsigned long long words) {
  const Word* const from = reinterpret_cast<const Word*>(source);
  Word* const into = reinterpret_cast<Word*>(target);
  constexpr int LOADS_AHEAD = sizeof(Word) == 1 ? 1 : 4;
#pragma unroll LOADS_AHEAD
  for (unsigned long long word = threadIdx.x; word < words; word += blockDim.x) {
    into[word] = from[word];
  }
}

// Bytes up to where the target's word begins, words, and the bytes behind the last of them. The source is as far from a word.
template <typename Word>
__device__ void copy_piece(const CopyDescriptor& piece) {
  const unsigned long long to_word = (sizeof(Word) - piece.target % sizeof(Word)) % sizeof(Word);
  const unsigned long long head = to_word < piece.size ? to_word : piece.size;
  const unsigned long long words = (piece.size - head) / sizeof(Word);
  const unsigned long long body = head + words * sizeof(Word);
  copy_words<unsigned char>(piece.target, piece.source, head);
  copy_words<Word>(piece.target + head, piece.source + head, words);
  copy_words<unsigned char>(piece.target + body, piece.source + body, piece.size - body);
}

extern "C" __global__ void gather(const CopyDescriptor* pieces, unsigned count) {
  for (unsigned number = blockIdx.x; number < count; number += gridDim.x) {
    const CopyDescriptor piece = pieces[number];
    const unsigned long long apart = piece.target ^ piece.source;
    if (apart % sizeof(uint4) == 0) {
      copy_piece<uint4>(piece);
    } else if (apart % sizeof(unsigned) == 0) {
      copy_piece<unsigned>(piece);
    } else {
      copy_piece<unsigned char>(piece);
    }
  }
}

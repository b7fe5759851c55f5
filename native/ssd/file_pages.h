// Pages of a file that another library reads through a memory map of its own: brought in by a call that reports errors.
//
// What it is: a second, read-only mapping of the same file. A page that the disk cannot give ends the process that reads it from
// a map (SIGBUS); `load` asks for it first and returns an errno. It does not hold the pages: what the kernel takes back between
// `load` and the use is read from the disk again, by the map.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace kvpool {

class FilePages;

// The pages, or the errno of the step that failed.
struct FilePagesResult {
  std::shared_ptr<FilePages> pages;
  int error = 0;
};

class FilePages {
 public:
  // Maps the file as long as it is now; it may not be empty, nor a link.
  [[nodiscard]] static FilePagesResult open(const std::string& path);

  ~FilePages();
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  // Has the first `bytes` of the file in memory. Returns 0, or EIO where the disk does not give them or the file has become
  // shorter. Linux before 5.14 has no such call: 0.
  [[nodiscard]] int load(uint64_t bytes) const noexcept;

 private:
  FilePages(std::string path, void* data, uint64_t size) noexcept : path_(std::move(path)), data_(data), size_(size) {}

  const std::string path_;
  void* const data_;
  const uint64_t size_;
};

}  // namespace kvpool

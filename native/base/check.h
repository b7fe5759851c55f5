// Assertions that stay on in production. A broken invariant ends the process before it can serve wrong bytes.
#pragma once

#include <cstdio>
#include <cstdlib>

#define KVPOOL_CHECK(condition)                                                                   \
  do {                                                                                            \
    if (!(condition)) [[unlikely]] {                                                              \
      std::fprintf(stderr, "%s:%d: kvpool invariant broken: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                               \
    }                                                                                             \
  } while (false)

// For inner loops: on in debug builds only.
#ifdef NDEBUG
#define KVPOOL_DCHECK(condition) static_cast<void>(0)
#else
#define KVPOOL_DCHECK(condition) KVPOOL_CHECK(condition)
#endif

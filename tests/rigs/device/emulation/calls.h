// How exported calls begin: counted, refused where a test has ordered it.
#pragma once

#include "world.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define BEGIN(name)                                                  \
  if (const CUresult refused = begin(name); refused != SUCCESS) {    \
    return refused;                                                  \
  }
#define BEGIN_IN_CONTEXT(name)                                               \
  if (const CUresult refused = begin_in_context(name); refused != SUCCESS) { \
    return refused;                                                          \
  }
// A device that has failed releases all the same.
#define BEGIN_RELEASE(name)                                       \
  if (const CUresult refused = begin(name); refused != SUCCESS) { \
    return refused;                                               \
  }                                                               \
  if (current() == nullptr) {                                     \
    return INVALID_CONTEXT;                                       \
  }

// The Python module `kvpool_native`: bindings only, no logic. Each concept binds itself in a file of its own.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(kvpool_native, module) {
  // A Pool that lives until the interpreter ends is no leak worth a page of text on the user's terminal.
  nanobind::set_leak_warnings(false);
  module.doc() = "Native core of kvpool: key hashing, shared index, slot arena, checksummed copies.";
  kvpool::bind_rows(module);
  kvpool::bind_frame_socket(module);
  kvpool::bind_keys(module);
  kvpool::bind_remote_index(module);
  kvpool::bind_memory(module);
  kvpool::bind_directory(module);
  kvpool::bind_tier_set(module);
  kvpool::bind_copy(module);
  kvpool::bind_recall(module);
  kvpool::bind_tuning(module);
  kvpool::bind_catalogue(module);
  kvpool::bind_ssd(module);
  kvpool::bind_net(module);
  kvpool::bind_near(module);
  kvpool::bind_device(module);
  kvpool::bind_mover(module);
  kvpool::bind_reuse(module);
  kvpool::bind_saves(module);
  kvpool::bind_leases(module);
  kvpool::bind_blocks(module);
  kvpool::bind_flush(module);
  kvpool::bind_attention(module);
}

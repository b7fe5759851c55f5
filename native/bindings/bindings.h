// Declarations of the binding functions, one per concept.
#pragma once

#include <nanobind/nanobind.h>

namespace kvpool {

class CopyPool;
class Directory;

// Of a queue or a team: more than any machine has use for; a guess that stops a mistaken argument.
inline constexpr unsigned THREADS_MAX = 64;

void bind_rows(nanobind::module_& module);
void bind_frame_socket(nanobind::module_& module);
void bind_keys(nanobind::module_& module);
void bind_memory(nanobind::module_& module);
void bind_remote_index(nanobind::module_& module);
void bind_directory(nanobind::module_& module);
void bind_copy(nanobind::module_& module);
void bind_summaries(nanobind::module_& module, nanobind::class_<CopyPool>& pool);
void bind_recall(nanobind::module_& module);
void bind_tuning(nanobind::module_& module);
void bind_catalogue(nanobind::module_& module);
void bind_ssd(nanobind::module_& module);
void bind_net(nanobind::module_& module);
void bind_near(nanobind::module_& module);
void bind_device(nanobind::module_& module);
void bind_mover(nanobind::module_& module);
void bind_reuse(nanobind::module_& module);
void bind_blocks(nanobind::module_& module);
void bind_flush(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_changes(nanobind::module_& module, nanobind::class_<Directory>& directory);
void bind_tiers(nanobind::module_& module, nanobind::class_<Directory>& directory);
void bind_tier_set(nanobind::module_& module);
void bind_holds(nanobind::module_& module, nanobind::class_<Directory>& directory);
void bind_reservations(nanobind::module_& module, nanobind::class_<Directory>& directory);
void bind_shares(nanobind::module_& module, nanobind::class_<Directory>& directory);
void bind_leases(nanobind::module_& module);
void bind_saves(nanobind::module_& module);
void bind_retention(nanobind::class_<Directory>& directory);

}  // namespace kvpool

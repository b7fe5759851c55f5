// Bindings of the stream between nodes. Checks every extent before anything runs; columns cross packed, once per offer or job.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <system_error>

#include "bindings.h"
#include "columns.h"
#include "extents.h"
#include "net/extent_server.h"
#include "net/pull_queue.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

StreamTicket ticket_of(const nb::bytes& packed) {
  StreamTicket ticket{};
  if (packed.size() != ticket.size()) {
    throw nb::value_error("a ticket must be 32 bytes");
  }
  std::memcpy(ticket.data(), packed.data(), ticket.size());
  return ticket;
}

std::shared_ptr<ExtentServer> make_server(std::shared_ptr<Mapping> arena, const std::shared_ptr<Mapping>& index,
                                          const std::string& address, uint16_t port, unsigned threads, size_t offers_max,
                                          size_t strangers_max, size_t connections_max, double hello_timeout_s, double stall_s,
                                          uint64_t peer_bytes_per_s, bool is_encrypted) {
  if (threads == 0 || threads > THREADS_MAX || offers_max == 0 || strangers_max == 0 || connections_max == 0) {
    throw nb::value_error("threads must be 1 to 64; offers_max, strangers_max and connections_max positive");
  }
  auto view = IndexView::attach(index);
  if (view == nullptr) {
    throw nb::value_error("index is no index of this version");
  }
  const ExtentServerOptions options{address,         port,
                                    threads,         offers_max,
                                    strangers_max,   connections_max,
                                    milliseconds_of(hello_timeout_s, "hello_timeout_s"),
                                    milliseconds_of(stall_s, "stall_s"),
                                    peer_bytes_per_s, is_encrypted};
  try {
    const ReleasedGil released;
    return std::make_shared<ExtentServer>(std::move(arena), std::move(view), options);
  } catch (const std::system_error& error) {
    const std::string what = error.what();
    const int code = error.code().value();
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(code, what).ptr());
    throw nb::python_error();
  }
}

std::vector<OfferedChunk> offered_chunks(const std::vector<PullRow>& rows, const nb::bytes& generations) {
  const auto numbers = column(generations, rows.size(), "generations");
  std::vector<OfferedChunk> chunks;
  for (size_t row = 0; row < rows.size(); ++row) {
    if (numbers[row] == 0) {
      throw nb::value_error("a chunk has no generation");
    }
    chunks.push_back({rows[row].arena_offset, rows[row].slot, numbers[row]});
  }
  return chunks;
}

std::pair<uint64_t, uint8_t> offer(ExtentServer& server, const nb::bytes& ticket, const IndexView& index, const nb::bytes& offsets,
                                   const nb::bytes& slots, const nb::bytes& generations, uint32_t extents, uint64_t extent_bytes,
                                   uint32_t connections, uint64_t peer, double timeout_s) {
  const auto rows = checked_rows(server.arena(), index, offsets, slots, extents, extent_bytes, connections);
  OfferPlan plan;
  plan.chunks = offered_chunks(rows, generations);
  plan.extents = extents;
  plan.extent_bytes = extent_bytes;
  plan.connections = connections;
  plan.peer = peer;
  plan.deadline = StreamClock::now() + milliseconds_of(timeout_s, "timeout_s");
  const OfferAnswer answer = server.offer(ticket_of(ticket), std::move(plan));
  return {answer.offer, static_cast<uint8_t>(answer.refusal)};
}

nb::bytes checks(const ExtentServer& server, const IndexView& index, const nb::bytes& offsets, const nb::bytes& slots,
                 const nb::bytes& generations, uint32_t extents, uint64_t extent_bytes) {
  const auto rows = checked_rows(server.arena(), index, offsets, slots, extents, extent_bytes, 1);
  return pack(offered_checks(index, offered_chunks(rows, generations), extents));
}

uint64_t pull(PullQueue& queue, const std::string& address, uint16_t port, const nb::bytes& ticket, const IndexView& index,
              const nb::bytes& offsets, const nb::bytes& slots, uint32_t extents, uint64_t extent_bytes, uint32_t connections,
              double stall_s, double timeout_s, const nb::bytes& checks, bool is_encrypted) {
  PullPlan plan;
  plan.address = address;
  plan.port = port;
  plan.ticket = ticket_of(ticket);
  plan.parts = connections;
  plan.extents = extents;
  plan.extent_bytes = extent_bytes;
  plan.rows = checked_rows(queue.arena(), index, offsets, slots, extents, extent_bytes, connections);
  if (checks.size() != 0 && checks.size() != plan.rows.size() * extents * sizeof(uint32_t)) {
    throw nb::value_error("checks must be 4 bytes for each extent of each chunk, or empty");
  }
  if (is_encrypted && tls_library().empty()) {
    throw nb::value_error("there is no TLS: this build or this machine has no OpenSSL 3");
  }
  plan.checks = unpacked<uint32_t>(checks);
  plan.is_encrypted = is_encrypted;
  plan.stall = milliseconds_of(stall_s, "stall_s");
  plan.deadline = StreamClock::now() + milliseconds_of(timeout_s, "timeout_s");
  return queue.pull(std::move(plan));
}

Counts server_stats(const ExtentServer& server) {
  const ExtentServerStats counts = server.stats();
  Counts result;
  result["bad_hello"] = counts.strangers.bad_hello;
  result["unencrypted"] = counts.strangers.unencrypted;
  result["untrusted"] = counts.strangers.untrusted;
  result["bad_ticket"] = counts.strangers.bad_ticket;
  result["repeated"] = counts.strangers.repeated;
  result["silent"] = counts.strangers.silent;
  result["closed"] = counts.strangers.closed;
  result["crowded"] = counts.strangers.crowded;
  result["offers"] = counts.offers;
  result["running"] = counts.running;
  result["waiting"] = counts.waiting;
  result["connections"] = counts.connections;
  result["sent_bytes"] = counts.sent_bytes;
  result["gone_chunks"] = counts.gone_chunks;
  result["stalled"] = counts.stalled;
  result["broken"] = counts.broken;
  result["accept_failures"] = counts.accept_failures;
  return result;
}

Counts queue_stats(const PullQueue& queue) {
  const PullQueueStats counts = queue.stats();
  Counts result;
  result["waiting"] = counts.waiting;
  result["running"] = counts.running;
  result["received_bytes"] = counts.received_bytes;
  result["pulled_chunks"] = counts.pulled_chunks;
  result["failed_chunks"] = counts.failed_chunks;
  return result;
}

void bind_server(nb::module_& module) {
  nb::class_<OfferOutcome>(module, "OfferOutcome", "The end of one offer.")
      .def_ro("offer", &OfferOutcome::offer)
      .def_prop_ro("end", [](const OfferOutcome& self) { return static_cast<uint8_t>(self.end); },
                   "0: all was sent or marked as gone; 1: a connection failed; 2: its deadline passed; 3: it was withdrawn.")
      .def_ro("sent_bytes", &OfferOutcome::bytes);
  nb::class_<ExtentServer> server(module, "ExtentServer", "Threads that send chunks to peers that present a ticket.");
  server.def(nb::new_(&make_server), "arena"_a, "index"_a, "address"_a, "port"_a, nb::kw_only(), "threads"_a, "offers_max"_a,
           "strangers_max"_a, "connections_max"_a, "hello_timeout_s"_a, "stall_s"_a, "peer_bytes_per_s"_a = 0,
           "encrypted"_a = false,
           "Listens on a numeric address and a port, 0: any that is free. OSError names what is wrong. GIL released.")
      .def_prop_ro("port", &ExtentServer::port)
      .def("offer", &offer, "ticket"_a, "index"_a, "offsets"_a, "slots"_a, "generations"_a, nb::kw_only(), "extents"_a,
           "extent_bytes"_a, "connections"_a, "peer"_a, "timeout_s"_a,
           "The number of an offer, and 0; or 0 and why there is none: 1 too many offers, 2 the ticket is in use, 3\n"
           "stopped. Columns of u64. The slots must be protected until the offer has ended.")
      .def("checks", &checks, "index"_a, "offsets"_a, "slots"_a, "generations"_a, nb::kw_only(), "extents"_a, "extent_bytes"_a,
           "CRC-32C u32 [chunk][extent] of chunks to be offered; empty where not all of their extents have landed.")
      .def("withdraw", [](ExtentServer& self, const nb::bytes& ticket) { return self.withdraw(ticket_of(ticket)); }, "ticket"_a,
           "Ends an offer, reported like any end; False where no offer has the ticket.")
      .def("stats", &server_stats);
  bind_line(server);
}

}  // namespace

void bind_net(nb::module_& module) {
  module.def("tls_library", &tls_library,
             "The OpenSSL in use, with its version, as it says itself; empty: this build or this machine has none.");
  bind_server(module);
  nb::class_<PullOutcome>(module, "PullOutcome", "The end of one chunk of a pull.")
      .def_ro("job", &PullOutcome::job)
      .def_ro("chunk", &PullOutcome::chunk, "Its row in the job.")
      .def_prop_ro("status", [](const PullOutcome& self) { return static_cast<uint8_t>(self.status); },
                   "0: done; 1: the peer no longer has it or sent other bytes; 2: failed; 3: cancelled.")
      .def_prop_ro("fault", [](const PullOutcome& self) { return std::string(pull_fault_word(self.fault)); },
                   "A word for what failed; empty where nothing did.")
      .def_ro("received_bytes", &PullOutcome::bytes)
      .def_ro("is_unmarked", &PullOutcome::is_unmarked,
              "It failed before an extent had landed, and is not marked: it can be received again.")
      .def_prop_ro("waited_us", [](const PullOutcome& self) { return self.waited.count(); },
                   "From the call to the begin of its connection, from which the other times count.")
      .def_prop_ro("first_extent_us", [](const PullOutcome& self) { return self.first_extent.count(); }, "0: none has landed.")
      .def_prop_ro("elapsed_us", [](const PullOutcome& self) { return self.elapsed.count(); });
  nb::class_<PullQueue> queue(module, "PullQueue", "Threads that receive chunks from peers into the arena.");
  queue
      .def(nb::new_(&make_queue<PullQueue>), "arena"_a, "index"_a, "threads"_a, "jobs_max"_a, nb::call_guard<ReleasedGil>())
      .def("pull", &pull, "address"_a, "port"_a, "ticket"_a, "index"_a, "offsets"_a, "slots"_a, nb::kw_only(), "extents"_a,
           "extent_bytes"_a, "connections"_a, "stall_s"_a, "timeout_s"_a, "checks"_a = nb::bytes("", 0), "encrypted"_a = false,
           "A job's number, 0 where the queue is full or stopped. Columns of u64: where each chunk goes, and its slot, in which no\n"
           "extent may have landed. `stall_s`: the longest time without a byte. `checks`: CRC-32C u32 [chunk][extent] as the owner promised\n"
           "them, or empty. Extents are announced on the index as they land.")
      .def("connect_ahead", &PullQueue::connect_ahead, "address"_a, "port"_a, "connections"_a,
           "Begins to make connections for the next pull from there, which end soon where none takes them. Never waits.")
      .def("cancel", [](PullQueue& self, uint64_t job) { return self.cancel(job); }, "job"_a,
           "Ends a job's remaining chunks, reported like any end; False where it has ended.")
      .def("stats", &queue_stats);
  bind_line(queue);
}

}  // namespace kvpool

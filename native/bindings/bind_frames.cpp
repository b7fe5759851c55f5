// Bindings of frames and of a client's end of the daemon's socket. Plain values in, bytes out; the GIL is released over waits. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <span>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "frames/frame_socket.h"
#include "frames/frame_writer.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

using FieldNames = nb::typed<nb::tuple, nb::str, nb::ellipsis>;

constexpr double TIMEOUT_S_MAX = 1e9;
constexpr unsigned DEPTH_MAX = 64;  // of lists and maps within one another; records have three

// The daemon sends what is no frame.
struct MalformedFrame : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void raise(PyObject* kind, const std::string& text) {
  PyErr_SetString(kind, text.c_str());
  throw nb::python_error();
}

[[noreturn]] void raise_late(const FrameSocket& socket) {
  raise(PyExc_TimeoutError,
        "the daemon has read " + std::to_string(socket.sent()) + " of " + std::to_string(socket.frame_bytes()) + " bytes in time");
}

std::span<const uint8_t> bytes_in(PyObject* bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) != 0) {
    throw nb::python_error();
  }
  return {reinterpret_cast<const uint8_t*>(data), static_cast<size_t>(size)};
}

void put_number(FrameWriter& writer, PyObject* number) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (overflow > 0) {
    const unsigned long long large = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() != nullptr) {
      throw nb::python_error();
    }
    writer.put_number(large);
  } else if (overflow < 0) {
    raise(PyExc_OverflowError, "a number is below those of 64 bits");
  } else if (value < 0) {
    writer.put_negative(value);
  } else {
    writer.put_number(static_cast<uint64_t>(value));
  }
}

// REQUIRES: the value lives until the frame was sent, and nobody changes it.
void put_value(FrameWriter& writer, PyObject* value, unsigned depth) {
  if (PyBytes_Check(value)) {
    writer.put_bytes(bytes_in(value));
  } else if (value == Py_True || value == Py_False) {
    writer.put_truth(value == Py_True);
  } else if (PyLong_Check(value)) {
    put_number(writer, value);
  } else if (PyUnicode_Check(value)) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == nullptr) {
      throw nb::python_error();
    }
    writer.put_text({text, static_cast<size_t>(size)});
  } else if (PyFloat_Check(value)) {
    writer.put_fraction(PyFloat_AsDouble(value));
  } else if (value == Py_None) {
    writer.put_nothing();
  } else if (PyByteArray_Check(value) || PyMemoryView_Check(value)) {
    const nb::bytes copied = nb::steal<nb::bytes>(PyBytes_FromObject(value));
    if (!copied.is_valid()) {
      throw nb::python_error();
    }
    writer.put_copied(bytes_in(copied.ptr()));
  } else if (depth == DEPTH_MAX) {
    raise(PyExc_ValueError, "a field of a frame is too deep");
  } else if (PyTuple_Check(value)) {
    writer.begin_list(static_cast<size_t>(PyTuple_Size(value)));
    for (Py_ssize_t place = 0; place < PyTuple_Size(value); ++place) {
      put_value(writer, PyTuple_GetItem(value, place), depth + 1);
    }
  } else if (PyList_Check(value)) {
    writer.begin_list(static_cast<size_t>(PyList_Size(value)));
    for (Py_ssize_t place = 0; place < PyList_Size(value); ++place) {
      put_value(writer, PyList_GetItem(value, place), depth + 1);
    }
  } else if (PyDict_Check(value)) {
    writer.begin_map(static_cast<size_t>(PyDict_Size(value)));
    Py_ssize_t place = 0;
    PyObject* key = nullptr;
    PyObject* of_key = nullptr;
    while (PyDict_Next(value, &place, &key, &of_key) != 0) {
      put_value(writer, key, depth + 1);
      put_value(writer, of_key, depth + 1);
    }
  } else {
    raise(PyExc_TypeError, "a field of a frame is no plain value");
  }
}

// REQUIRES: nobody changes the record until the frame was sent.
void write_record(FrameWriter& writer, uint64_t kind, uint64_t sequence, nb::handle record, const FieldNames& names) {
  writer.begin(kind, sequence, names.size());
  for (const nb::handle name : names) {
    const nb::object value = nb::getattr(record, name);  // the record has it, too
    put_value(writer, value.ptr(), 0);
  }
  if (writer.body_bytes() > FRAME_BODY_BYTES_MAX) {
    raise(PyExc_AssertionError, "frame of kind " + std::to_string(kind) + " has " + std::to_string(writer.body_bytes()) +
                                    " bytes, at most " + std::to_string(FRAME_BODY_BYTES_MAX) + " fit");
  }
}

nb::bytes encode_record(uint64_t kind, uint64_t sequence, nb::handle record, const FieldNames& names) {
  FrameWriter writer;
  write_record(writer, kind, sequence, record, names);
  const auto size = static_cast<Py_ssize_t>(FRAME_LENGTH_BYTES + writer.body_bytes());
  nb::bytes frame = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, size));
  if (!frame.is_valid()) {
    throw nb::python_error();
  }
  char* end = PyBytes_AsString(frame.ptr());
  for (const iovec& piece : writer.finish()) {
    end = std::copy_n(static_cast<const char*>(piece.iov_base), piece.iov_len, end);
  }
  return frame;
}

// What there is to say about an exchange that has ended.
void require_done(const FrameSocket& socket, FrameStatus status) {
  switch (status) {
    case FrameStatus::DONE:
    case FrameStatus::INTERRUPTED:
      return;
    case FrameStatus::UNREAD:
      raise_late(socket);
    case FrameStatus::LATE:
      raise(PyExc_TimeoutError, "the daemon did not answer in time");
    case FrameStatus::CLOSED:
      raise(PyExc_ConnectionResetError, "the daemon closed the connection");
    case FrameStatus::BAD_LENGTH:
      throw MalformedFrame("frame announces " + std::to_string(socket.announced()) + " bytes, expected " +
                           std::to_string(FRAME_BODY_BYTES_MIN) + ".." + std::to_string(FRAME_BODY_BYTES_MAX));
    case FrameStatus::EXCESS:
      throw MalformedFrame("answer is followed by " + std::to_string(socket.excess()) + " unexpected bytes");
    case FrameStatus::FAILED:
      errno = socket.error();
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
  }
}

// Carries on until the work has ended, past signals whose handlers let it go on.
template <typename Work>
void carry_out(FrameSocket& socket, const Work& work) {
  for (;;) {
    FrameStatus status{};
    {
      const ReleasedGil released;
      status = work();
    }
    if (status == FrameStatus::DONE) {
      return;
    }
    const bool is_interrupted = status == FrameStatus::INTERRUPTED;
    if (!is_interrupted || PyErr_CheckSignals() != 0) {
      socket.close_descriptors();
      require_done(socket, status);
      throw nb::python_error();
    }
  }
}

std::chrono::nanoseconds nanoseconds_of(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds > 0 ? std::min(seconds, TIMEOUT_S_MAX) : 0.0));
}

nb::bytes body_of(const FrameSocket& socket) { return nb::bytes(socket.body().data(), socket.body().size()); }

nb::bytes ask(FrameSocket& socket, uint64_t kind, uint64_t sequence, nb::handle record, const FieldNames& names, double timeout_s,
              size_t descriptors) {
  write_record(socket.writer(), kind, sequence, record, names);
  socket.begin(nanoseconds_of(timeout_s), descriptors);
  socket.take_frame();
  carry_out(socket, [&] {
    const FrameStatus sent = socket.send();
    return sent == FrameStatus::DONE ? socket.receive() : sent;
  });
  return body_of(socket);
}

nb::bytes receive(FrameSocket& socket, double timeout_s, size_t descriptors) {
  socket.begin(nanoseconds_of(timeout_s), descriptors);
  carry_out(socket, [&] { return socket.receive(); });
  return body_of(socket);
}

void send(FrameSocket& socket, const nb::bytes& frames, double timeout_s) {
  socket.begin(nanoseconds_of(timeout_s), 0);
  socket.take_bytes(bytes_in(frames.ptr()));
  carry_out(socket, [&] { return socket.send(); });
}

// With the GIL: it takes no longer than the wait for the GIL might, beside a thread that computes.
bool post(FrameSocket& socket, const nb::bytes& frames) {
  const FrameStatus status = socket.post(bytes_in(frames.ptr()));
  if (status == FrameStatus::UNREAD) {
    return false;
  }
  if (status == FrameStatus::CLOSED) {
    raise_late(socket);
  }
  require_done(socket, status);
  return true;
}

}  // namespace

void bind_frame_socket(nb::module_& module) {
  nb::exception<MalformedFrame>(module, "MalformedFrame", PyExc_ValueError);
  module.def("encode_record", &encode_record, "kind"_a, "sequence"_a, "record"_a, "names"_a,
             "The frame of a record's fields, by their names: numbers of 64 bits, floats, text, bytes, and lists, tuples and maps of such.\n"
             "AssertionError for one that is too long.");
  nb::class_<FrameSocket>(module, "FrameSocket",
                          "A client's end of the daemon's socket: sends frames, and receives those that answer them. One thread at a time.\n"
                          "OSError where the socket fails, is closed (ConnectionResetError) or time runs out (TimeoutError), MalformedFrame for\n"
                          "what is no frame: after each the socket is of no use. Signals' handlers run meanwhile. GIL released over waits.")
      .def(nb::init<int>(), "fd"_a, "Of a connected stream socket, which somebody else closes.")
      .def("ask", &ask, "kind"_a, "sequence"_a, "record"_a, "names"_a, "timeout_s"_a, "descriptors"_a = 0,
           "Sends a frame as `encode_record` makes it, and returns the body of the next one, with which so many descriptors may come.")
      .def("receive", &receive, "timeout_s"_a, "descriptors"_a = 0, "The body of the next frame.")
      .def("send", &send, "frames"_a, "timeout_s"_a, "Sends whole frames.")
      .def("post", &post, "frames"_a, "Sends whole frames without waiting. False where the socket is full: then nothing was sent.")
      .def("take_descriptors", &FrameSocket::take_descriptors,
           "Those that came with the latest answer, once; the caller closes them. What nobody takes is closed.")
      .def("forget", &FrameSocket::forget, "The socket is closed, or about to be. Any thread.");
}

}  // namespace kvpool

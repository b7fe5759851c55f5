// One end of a pair of sockets is a FrameSocket, the other an unusual daemon.
#include "frames/frame_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "../harness.h"

using namespace kvpool;
using namespace std::chrono_literals;

namespace {

constexpr auto LONG = std::chrono::nanoseconds(60s);
constexpr auto SHORT = std::chrono::nanoseconds(30ms);

struct Ends {
  Ends() {
    int pair[2];
    EXPECT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    client_fd = pair[0];
    daemon_fd = pair[1];
  }
  ~Ends() {
    ::close(client_fd);
    if (daemon_fd >= 0) {
      ::close(daemon_fd);
    }
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  void answer(const std::string& bytes) const { EXPECT(::write(daemon_fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())); }
  void hang_up() { ::close(std::exchange(daemon_fd, -1)); }

  int client_fd = -1;
  int daemon_fd = -1;
};

std::string framed(const std::string& body) {
  const auto size = static_cast<uint32_t>(body.size());
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + body;
}

std::string text_of(std::span<const uint8_t> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::span<const uint8_t> bytes_of(const std::string& text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

FrameStatus exchange(FrameSocket& socket, std::chrono::nanoseconds timeout, size_t descriptors = 0) {
  socket.writer().begin(7, 1, 0);
  socket.begin(timeout, descriptors);
  socket.take_frame();
  const FrameStatus sent = socket.send();
  return sent == FrameStatus::DONE ? socket.receive() : sent;
}

void send_descriptors(int fd, const std::string& bytes, std::span<const int> descriptors) {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
  cmsghdr* const part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size() * sizeof(int));
  EXPECT(::sendmsg(fd, &message, 0) == static_cast<ssize_t>(bytes.size()));
}

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

}  // namespace

TEST(an_exchange_sends_a_frame_and_returns_the_body_of_the_answer) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  for (const std::string& body : {std::string("one"), std::string(100'000, 'b'), std::string("three")}) {
    std::thread daemon([&] { ends.answer(framed(body)); });
    EXPECT(exchange(socket, LONG) == FrameStatus::DONE);
    daemon.join();
    EXPECT(text_of(socket.body()) == body);
    char sent[16];
    EXPECT(::read(ends.daemon_fd, sent, sizeof(sent)) == 7);
    EXPECT(std::string(sent, 7) == framed("\x92\x07\x01"));
  }
}

TEST(an_answer_in_any_pieces_is_whole) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  const std::string answer = framed("answer");
  std::thread daemon([&] {
    for (const char byte : answer) {
      ends.answer(std::string(1, byte));
      std::this_thread::yield();
    }
  });
  EXPECT(exchange(socket, LONG) == FrameStatus::DONE);
  daemon.join();
  EXPECT(text_of(socket.body()) == "answer");
}

TEST(no_answer_or_a_part_of_one_is_late) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4}, size_t{8}}) {
    const Ends ends;
    FrameSocket socket(ends.client_fd);
    ends.answer(framed("answer").substr(0, size));
    EXPECT(exchange(socket, SHORT) == FrameStatus::LATE);
  }
}

TEST(a_daemon_that_trickles_is_late_though_each_wait_is_short) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  std::atomic<bool> has_ended = false;
  std::thread daemon([&] {
    ends.answer(std::string("\x00\x10\0\0", 4));
    while (!has_ended) {
      ends.answer("x");
      std::this_thread::sleep_for(2ms);
    }
  });
  EXPECT(exchange(socket, SHORT) == FrameStatus::LATE);
  has_ended = true;
  daemon.join();
}

TEST(a_daemon_that_does_not_read_is_found_out_and_one_that_reads_slowly_gets_all) {
  const std::string frames(3'000'000, 'f');
  {
    const Ends ends;
    FrameSocket socket(ends.client_fd);
    socket.begin(SHORT, 0);
    socket.take_bytes(bytes_of(frames));
    EXPECT(socket.send() == FrameStatus::UNREAD);
    EXPECT(socket.frame_bytes() == frames.size());
    EXPECT(socket.sent() < frames.size());
  }
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  std::string read;
  std::thread daemon([&] {
    std::array<char, 10'000> part{};
    while (read.size() < frames.size()) {
      const ssize_t got = ::read(ends.daemon_fd, part.data(), part.size());
      read.append(part.data(), static_cast<size_t>(std::max<ssize_t>(got, 0)));
    }
  });
  socket.begin(LONG, 0);
  socket.take_bytes(bytes_of(frames));
  EXPECT(socket.send() == FrameStatus::DONE);
  daemon.join();
  EXPECT(read == frames);
}

TEST(lengths_that_no_frame_has_are_refused_before_a_body_is_read) {
  for (const uint32_t length : {0U, 1U, static_cast<uint32_t>(FRAME_BODY_BYTES_MAX + 1), UINT32_MAX}) {
    const Ends ends;
    FrameSocket socket(ends.client_fd);
    ends.answer(std::string(reinterpret_cast<const char*>(&length), sizeof(length)));
    EXPECT(exchange(socket, LONG) == FrameStatus::BAD_LENGTH);
    EXPECT(socket.announced() == length);
  }
}

TEST(the_longest_answer_fits) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  const std::string body(FRAME_BODY_BYTES_MAX, 'b');
  std::thread daemon([&] {
    const std::string frame = framed(body);
    for (size_t at = 0; at < frame.size();) {
      at += static_cast<size_t>(std::max<ssize_t>(::write(ends.daemon_fd, frame.data() + at, frame.size() - at), 0));
    }
  });
  EXPECT(exchange(socket, LONG) == FrameStatus::DONE);
  daemon.join();
  EXPECT(text_of(socket.body()) == body);
}

TEST(bytes_behind_an_answer_are_refused) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  ends.answer(framed("answer") + "more");
  EXPECT(exchange(socket, LONG) == FrameStatus::EXCESS);
  EXPECT(socket.excess() == 4);
}

TEST(a_daemon_that_has_gone_is_closed_or_a_failure) {
  Ends ends;
  FrameSocket socket(ends.client_fd);
  ends.answer("\x06");
  ends.hang_up();
  socket.begin(LONG, 0);
  EXPECT(socket.receive() == FrameStatus::CLOSED);
  EXPECT(exchange(socket, LONG) == FrameStatus::FAILED);
  EXPECT(socket.error() == EPIPE);
  socket.forget();
  EXPECT(exchange(socket, LONG) == FrameStatus::FAILED);
  EXPECT(socket.error() == EBADF);
}

TEST(a_post_is_whole_or_not_at_all_and_never_waits) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  const std::string frame = framed(std::string(1000, 'p'));
  size_t posted = 0;
  while (socket.post(bytes_of(frame)) == FrameStatus::DONE) {
    ++posted;
  }
  EXPECT(posted > 0);
  EXPECT(socket.post(bytes_of(frame)) == FrameStatus::UNREAD);
  std::string read(posted * frame.size(), '\0');
  EXPECT(::recv(ends.daemon_fd, read.data(), read.size(), MSG_WAITALL) == static_cast<ssize_t>(read.size()));
  EXPECT(read.compare(0, frame.size(), frame) == 0);
  pollfd more{ends.daemon_fd, POLLIN, 0};
  EXPECT(::poll(&more, 1, 0) == 0);
}

TEST(descriptors_come_where_they_are_expected_and_nobody_else_keeps_them) {
  const Ends ends;
  const std::array<int, 2> given{ends.client_fd, ends.daemon_fd};
  std::vector<int> taken;
  int forgotten = -1;
  {
    FrameSocket socket(ends.client_fd);
    send_descriptors(ends.daemon_fd, framed("two"), given);
    EXPECT(exchange(socket, LONG, 2) == FrameStatus::DONE);
    taken = socket.take_descriptors();
    EXPECT(taken.size() == 2);
    EXPECT(socket.take_descriptors().empty());

    send_descriptors(ends.daemon_fd, framed("none"), given);  // nobody expects them
    EXPECT(exchange(socket, LONG) == FrameStatus::DONE);
    EXPECT(socket.take_descriptors().empty());

    send_descriptors(ends.daemon_fd, framed("left"), given);
    EXPECT(exchange(socket, LONG, 2) == FrameStatus::DONE);
    forgotten = taken[1] + 1;  // the lowest free number
    EXPECT(is_open(forgotten));
    ends.answer(framed("next"));
    EXPECT(exchange(socket, LONG) == FrameStatus::DONE);
    EXPECT(!is_open(forgotten));

    send_descriptors(ends.daemon_fd, framed("last"), given);
    EXPECT(exchange(socket, LONG, 2) == FrameStatus::DONE);
    EXPECT(is_open(forgotten));
  }
  EXPECT(!is_open(forgotten));
  for (const int fd : taken) {
    EXPECT((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    ::close(fd);
  }
}

TEST(a_signal_interrupts_a_wait_which_then_goes_on) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  struct sigaction handler{};
  handler.sa_handler = [](int) {};
  EXPECT(::sigaction(SIGUSR1, &handler, nullptr) == 0);
  std::atomic<bool> was_interrupted = false;
  const pthread_t waiting = ::pthread_self();
  std::thread daemon([&] {
    ends.answer("\x06");
    while (!was_interrupted) {
      ::pthread_kill(waiting, SIGUSR1);
      std::this_thread::sleep_for(1ms);
    }
    ends.answer(std::string("\0\0\0answer", 9));
  });
  FrameStatus status = exchange(socket, LONG);
  EXPECT(status == FrameStatus::INTERRUPTED);
  was_interrupted = true;
  while (status == FrameStatus::INTERRUPTED) {
    status = socket.receive();
  }
  daemon.join();
  EXPECT(status == FrameStatus::DONE);
  EXPECT(text_of(socket.body()) == "answer");
}

TEST(signals_do_not_begin_the_time_anew) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  struct sigaction handler{};
  handler.sa_handler = [](int) {};
  EXPECT(::sigaction(SIGUSR1, &handler, nullptr) == 0);
  std::atomic<bool> is_over = false;
  const pthread_t waiting = ::pthread_self();
  std::thread others([&] {
    while (!is_over) {
      ::pthread_kill(waiting, SIGUSR1);
      std::this_thread::sleep_for(2ms);
    }
  });
  FrameStatus status = exchange(socket, SHORT);
  while (status == FrameStatus::INTERRUPTED) {
    status = socket.receive();
  }
  EXPECT(status == FrameStatus::LATE);
  is_over = true;
  others.join();
}

TEST(a_socket_that_does_not_wait_is_waited_for) {
  const Ends ends;
  EXPECT(::fcntl(ends.client_fd, F_SETFL, O_NONBLOCK) == 0);
  FrameSocket socket(ends.client_fd);
  EXPECT(exchange(socket, SHORT) == FrameStatus::LATE);
  std::thread daemon([&] {
    std::this_thread::sleep_for(20ms);
    ends.answer("\x06");
    std::this_thread::sleep_for(20ms);
    ends.answer(std::string("\0\0\0answer", 9));
  });
  EXPECT(exchange(socket, LONG) == FrameStatus::DONE);
  daemon.join();
  EXPECT(text_of(socket.body()) == "answer");
}

TEST(a_time_that_is_over_is_no_time_without_end) {
  const Ends ends;
  FrameSocket socket(ends.client_fd);
  ends.answer("\x06");
  socket.begin(std::chrono::nanoseconds(0), 0);
  EXPECT(socket.receive() == FrameStatus::LATE);
}

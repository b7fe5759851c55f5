// TLS by OpenSSL 3. See tls_session.h.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "net/openssl_calls.h"
#include "net/tls_session.h"

namespace kvpool {
namespace {

// A record of TLS has at most so many bytes.
constexpr size_t RECORD_BYTES = 16 << 10;
// Encrypted at once, and received with one system call: fewer wake-ups of the other side, and still in the core's own cache.
constexpr size_t SEALED_BYTES = 128 << 10;
constexpr size_t READ_AHEAD_BYTES = 128 << 10;
// Records without bytes that are taken within one call: an honest side sends a few in a handshake, and none afterwards.
constexpr int EMPTY_RECORDS_MAX = 16;
constexpr unsigned char CIPHER[2] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256

template <auto& Free>
struct Freed {
  template <typename Object>
  void operator()(Object* object) const noexcept {
    Free(object);
  }
};
using Context = std::unique_ptr<SSL_CTX, Freed<SSL_CTX_free>>;
using Connection = std::unique_ptr<SSL, Freed<SSL_free>>;
using Resumed = std::unique_ptr<SSL_SESSION, Freed<SSL_SESSION_free>>;
using BioMethod = std::unique_ptr<BIO_METHOD, Freed<BIO_meth_free>>;

class OpenSslSession final : public TlsSession {
 public:
  // REQUIRES: of `ticket` and `find` the one of its side.
  OpenSslSession(int fd, const StreamTicket* ticket, const TlsAcceptor::Find* find)
      : fd_(fd), ticket_(ticket == nullptr ? StreamTicket{} : *ticket), find_(find) {}

  [[nodiscard]] bool open(SSL_CTX* context, bool is_server);

  TlsState handshake() override;
  TlsState read(uint8_t* target, size_t size, size_t& received) override;
  size_t seal(std::span<const iovec> parts) override;
  TlsState flush(size_t& sent) override;

  // The ticket of that name, as its side knows it.
  [[nodiscard]] std::optional<StreamTicket> find(const uint8_t* identity) const { return (*find_)(identity); }
  [[nodiscard]] const StreamTicket& ticket() const noexcept { return ticket_; }

  [[nodiscard]] int receive_raw(char* target, int size);
  void send_raw(const char* bytes, int size) { out_.insert(out_.end(), bytes, bytes + size); }

 private:
  [[nodiscard]] TlsState state_after(int result) const;
  [[nodiscard]] bool write(const uint8_t* bytes, size_t size);

  const int fd_;  // the user's
  const StreamTicket ticket_;
  const TlsAcceptor::Find* const find_;
  Connection connection_;
  bool is_dry_ = false;     // nothing is there to be received
  bool has_ended_ = false;  // the other side sends no more
  std::vector<char> out_;   // encrypted, not sent
  size_t out_from_ = 0;
  std::vector<uint8_t> gathered_;  // small parts on their way into a record
};

OpenSslSession& of(BIO* bio) { return *static_cast<OpenSslSession*>(BIO_get_data(bio)); }
OpenSslSession& of(SSL* connection) { return *static_cast<OpenSslSession*>(SSL_get_app_data(connection)); }

// What OpenSSL reads from and writes to: the socket without waiting, and a buffer.
const BIO_METHOD* socket_method() {
  static const BioMethod METHOD = [] {
    BioMethod made(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvpool socket"));
    KVPOOL_CHECK(made != nullptr);
    BIO_meth_set_create(made.get(), [](BIO* bio) {
      BIO_set_init(bio, 1);
      return 1;
    });
    BIO_meth_set_read(made.get(), [](BIO* bio, char* target, int size) {
      BIO_clear_retry_flags(bio);
      const int received = of(bio).receive_raw(target, size);
      if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        BIO_set_retry_read(bio);
      }
      return received;
    });
    BIO_meth_set_write(made.get(), [](BIO* bio, const char* bytes, int size) {
      of(bio).send_raw(bytes, size);
      return size;
    });
    BIO_meth_set_ctrl(made.get(), [](BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1L : 0L; });
    return made;
  }();
  return METHOD.get();
}

// What both sides start from, instead of a certificate: the ticket's secret half.
SSL_SESSION* resumed_of(SSL* connection, const StreamTicket& ticket) {
  Resumed made(SSL_SESSION_new());
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(connection, CIPHER);
  const uint8_t* const secret = ticket.data() + TLS_IDENTITY_BYTES;
  if (made == nullptr || cipher == nullptr ||
      SSL_SESSION_set1_master_key(made.get(), secret, ticket.size() - TLS_IDENTITY_BYTES) != 1 ||
      SSL_SESSION_set_cipher(made.get(), cipher) != 1 || SSL_SESSION_set_protocol_version(made.get(), TLS1_3_VERSION) != 1) {
    return nullptr;
  }
  return made.release();
}

int use_ticket(SSL* connection, const EVP_MD*, const unsigned char** identity, size_t* size, SSL_SESSION** session) {
  const StreamTicket& ticket = of(connection).ticket();
  *session = resumed_of(connection, ticket);
  *identity = ticket.data();
  *size = TLS_IDENTITY_BYTES;
  return *session != nullptr ? 1 : 0;
}

// An unknown name is no error of its own: there is no certificate to go on with, and the handshake fails.
int find_ticket(SSL* connection, const unsigned char* identity, size_t size, SSL_SESSION** session) {
  *session = nullptr;
  const auto ticket = size == TLS_IDENTITY_BYTES ? of(connection).find(identity) : std::nullopt;
  if (ticket) {
    *session = resumed_of(connection, *ticket);
    return *session != nullptr ? 1 : 0;
  }
  return 1;
}

// Whatever the machine's own configuration of OpenSSL says.
Context make_context(const SSL_METHOD* method) {
  Context made(SSL_CTX_new(method));
  if (made == nullptr || SSL_CTX_set_min_proto_version(made.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(made.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(made.get(), "TLS_AES_128_GCM_SHA256") != 1 ||
      SSL_CTX_set1_groups_list(made.get(), "X25519:P-256") != 1 || SSL_CTX_set_num_tickets(made.get(), 0) != 1 ||
      SSL_CTX_set_max_early_data(made.get(), 0) != 1) {
    return nullptr;
  }
  SSL_CTX_clear_options(made.get(), SSL_OP_ALLOW_NO_DHE_KEX | SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
  SSL_CTX_set_options(made.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_session_cache_mode(made.get(), SSL_SESS_CACHE_OFF);
  // A call returns after each record, so that empty ones cannot keep it for ever.
  SSL_CTX_clear_mode(made.get(), SSL_MODE_AUTO_RETRY);
  SSL_CTX_set_read_ahead(made.get(), 1);
  return made;
}

bool OpenSslSession::open(SSL_CTX* context, bool is_server) {
  connection_.reset(SSL_new(context));
  BIO* const bio = connection_ == nullptr ? nullptr : BIO_new(socket_method());
  if (bio == nullptr) {
    return false;
  }
  BIO_set_data(bio, this);
  SSL_set_bio(connection_.get(), bio, bio);
  SSL_set_app_data(connection_.get(), this);
  is_server ? SSL_set_accept_state(connection_.get()) : SSL_set_connect_state(connection_.get());
  return true;
}

int OpenSslSession::receive_raw(char* target, int size) {
  ssize_t received = 0;
  do {
    received = recv(fd_, target, static_cast<size_t>(size), MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  is_dry_ = received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  has_ended_ = has_ended_ || received == 0;
  return static_cast<int>(received);
}

TlsState OpenSslSession::state_after(int result) const {
  const int error = SSL_get_error(connection_.get(), result);
  if (error == SSL_ERROR_WANT_READ) {
    return TlsState::WAITS_TO_READ;
  }
  const int reason = ERR_GET_REASON(ERR_peek_error());
  const bool is_alert = error == SSL_ERROR_SSL && reason >= SSL_AD_REASON_OFFSET && reason < SSL_AD_REASON_OFFSET + 256;
  return error == SSL_ERROR_ZERO_RETURN || has_ended_ || is_alert ? TlsState::CLOSED : TlsState::BROKEN;
}

TlsState OpenSslSession::handshake() {
  TlsState state = TlsState::WAITS_TO_READ;
  is_dry_ = false;
  for (int turn = 0; turn < EMPTY_RECORDS_MAX && state == TlsState::WAITS_TO_READ && !is_dry_; ++turn) {
    ERR_clear_error();
    const int result = SSL_do_handshake(connection_.get());
    state = result == 1 ? TlsState::DONE : state_after(result);
  }
  // What it has to say goes out whatever became of it: an alert shows the other side why.
  size_t sent = 0;
  const TlsState flushed = flush(sent);
  if (state == TlsState::WAITS_TO_READ && !is_dry_) {
    return TlsState::BROKEN;
  }
  if (state == TlsState::DONE && SSL_session_reused(connection_.get()) != 1) {
    return TlsState::BROKEN;
  }
  const bool goes_on = state == TlsState::DONE || state == TlsState::WAITS_TO_READ;
  return goes_on && flushed != TlsState::DONE ? flushed : state;
}

TlsState OpenSslSession::read(uint8_t* target, size_t size, size_t& received) {
  received = 0;
  for (int empty = 0; received < size && empty < EMPTY_RECORDS_MAX;) {
    ERR_clear_error();
    is_dry_ = false;
    size_t count = 0;
    const int result = SSL_read_ex(connection_.get(), target + received, size - received, &count);
    received += count;
    if (result == 1) {
      continue;
    }
    const TlsState state = state_after(result);
    if (state != TlsState::WAITS_TO_READ || is_dry_) {
      return received > 0 ? TlsState::DONE : state;
    }
    ++empty;
  }
  return received > 0 ? TlsState::DONE : TlsState::BROKEN;
}

bool OpenSslSession::write(const uint8_t* bytes, size_t size) {
  size_t written = 0;
  return SSL_write_ex(connection_.get(), bytes, size, &written) == 1 && written == size;
}

// Large parts from where they are, small ones gathered: a record for each mark would cost more than its bytes.
size_t OpenSslSession::seal(std::span<const iovec> parts) {
  KVPOOL_CHECK(out_.empty());
  ERR_clear_error();
  out_.reserve(SEALED_BYTES + SEALED_BYTES / 16);
  gathered_.reserve(RECORD_BYTES);
  gathered_.clear();
  size_t sealed = 0;
  for (const iovec& part : parts) {
    const auto* const bytes = static_cast<const uint8_t*>(part.iov_base);
    for (size_t at = 0; at < part.iov_len && sealed < SEALED_BYTES;) {
      const size_t left = std::min(part.iov_len - at, SEALED_BYTES - sealed);
      const bool is_whole = gathered_.empty() && left >= RECORD_BYTES;
      const size_t count = is_whole ? left - left % RECORD_BYTES : std::min(left, RECORD_BYTES - gathered_.size());
      if (is_whole) {
        if (!write(bytes + at, count)) {
          return 0;
        }
      } else {
        gathered_.insert(gathered_.end(), bytes + at, bytes + at + count);
        if (gathered_.size() == RECORD_BYTES) {
          if (!write(gathered_.data(), gathered_.size())) {
            return 0;
          }
          gathered_.clear();
        }
      }
      at += count;
      sealed += count;
    }
  }
  return gathered_.empty() || write(gathered_.data(), gathered_.size()) ? sealed : 0;
}

TlsState OpenSslSession::flush(size_t& sent) {
  sent = 0;
  while (out_from_ < out_.size()) {
    const ssize_t count = send(fd_, out_.data() + out_from_, out_.size() - out_from_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count > 0) {
      out_from_ += static_cast<size_t>(count);
      sent += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      return errno == EAGAIN || errno == EWOULDBLOCK ? TlsState::WAITS_TO_WRITE : TlsState::BROKEN;
    }
  }
  out_.clear();
  out_from_ = 0;
  return TlsState::DONE;
}

class OpenSslAcceptor final : public TlsAcceptor {
 public:
  OpenSslAcceptor(Context context, Find find) : context_(std::move(context)), find_(std::move(find)) {
    SSL_CTX_set_psk_find_session_callback(context_.get(), find_ticket);
  }
  std::unique_ptr<TlsSession> accept(int fd) override {
    auto made = std::make_unique<OpenSslSession>(fd, nullptr, &find_);
    return made->open(context_.get(), true) ? std::move(made) : nullptr;
  }

 private:
  const Context context_;
  const Find find_;
};

}  // namespace

std::string tls_library() { return load_openssl() ? OpenSSL_version(OPENSSL_VERSION) : ""; }

std::unique_ptr<TlsSession> make_tls_client(int fd, const StreamTicket& ticket) {
  if (!load_openssl()) {
    return nullptr;
  }
  static const Context CONTEXT = [] {
    Context made = make_context(TLS_client_method());
    if (made != nullptr) {
      // An owner without the ticket could only have a certificate, and none is trusted.
      SSL_CTX_set_verify(made.get(), SSL_VERIFY_PEER, nullptr);
      SSL_CTX_set_psk_use_session_callback(made.get(), use_ticket);
      SSL_CTX_set_default_read_buffer_len(made.get(), READ_AHEAD_BYTES);
    }
    return made;
  }();
  auto made = std::make_unique<OpenSslSession>(fd, &ticket, nullptr);
  return CONTEXT != nullptr && made->open(CONTEXT.get(), false) ? std::move(made) : nullptr;
}

std::unique_ptr<TlsAcceptor> make_tls_acceptor(TlsAcceptor::Find find) {
  if (!load_openssl()) {
    throw std::system_error(ENOTSUP, std::generic_category(), "this machine has no OpenSSL 3 (libssl.so.3)");
  }
  Context context = make_context(TLS_server_method());
  if (context == nullptr) {
    throw std::system_error(ENOTSUP, std::generic_category(), "OpenSSL offers no TLS 1.3 with TLS_AES_128_GCM_SHA256");
  }
  return std::make_unique<OpenSslAcceptor>(std::move(context), std::move(find));
}

}  // namespace kvpool

// What there is of TLS in a build without OpenSSL: nothing, and it says so.
#include <system_error>

#include "net/tls_session.h"

namespace kvpool {

std::string tls_library() { return ""; }

std::unique_ptr<TlsSession> make_tls_client(int, const StreamTicket&) { return nullptr; }

std::unique_ptr<TlsAcceptor> make_tls_acceptor(TlsAcceptor::Find) {
  throw std::system_error(ENOTSUP, std::generic_category(), "this build has no TLS: it was made without OpenSSL 3");
}

}  // namespace kvpool

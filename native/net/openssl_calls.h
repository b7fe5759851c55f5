// The functions of OpenSSL 3 that are called here, found in the machine's library when TLS is asked for first.
//
// What it is: a pointer for each function, under the function's own name. In this namespace the name hides the declaration, so that a
// call is written as ever, and what OpenSSL's macros call is found as well.
// Why: neither a module nor a wheel is bound to a file of OpenSSL. Where the machine has none the module is loaded all the same, and
// what is used gets the distribution's security updates at the next start.
// REQUIRES of every call: `load_openssl()` has returned true.
#pragma once

#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

namespace kvpool {

#define KVPOOL_CRYPTO_CALLS(call)                                                                                      \
  call(BIO_clear_flags) call(BIO_get_data) call(BIO_get_new_index) call(BIO_meth_free) call(BIO_meth_new)              \
  call(BIO_meth_set_create) call(BIO_meth_set_ctrl) call(BIO_meth_set_read) call(BIO_meth_set_write) call(BIO_new)     \
  call(BIO_set_data) call(BIO_set_flags) call(BIO_set_init) call(ERR_clear_error) call(ERR_peek_error)                 \
  call(OpenSSL_version)
#define KVPOOL_SSL_CALLS(call)                                                                                         \
  call(SSL_CIPHER_find) call(SSL_CTX_clear_options) call(SSL_CTX_ctrl) call(SSL_CTX_free) call(SSL_CTX_new)            \
  call(SSL_CTX_set_ciphersuites) call(SSL_CTX_set_default_read_buffer_len) call(SSL_CTX_set_max_early_data)            \
  call(SSL_CTX_set_num_tickets) call(SSL_CTX_set_options) call(SSL_CTX_set_psk_find_session_callback)                  \
  call(SSL_CTX_set_psk_use_session_callback) call(SSL_CTX_set_verify) call(SSL_SESSION_free) call(SSL_SESSION_new)     \
  call(SSL_SESSION_set1_master_key) call(SSL_SESSION_set_cipher) call(SSL_SESSION_set_protocol_version)                \
  call(SSL_do_handshake) call(SSL_free) call(SSL_get_error) call(SSL_get_ex_data) call(SSL_new) call(SSL_read_ex)      \
  call(SSL_session_reused) call(SSL_set_accept_state) call(SSL_set_bio) call(SSL_set_connect_state)                    \
  call(SSL_set_ex_data) call(SSL_write_ex) call(TLS_client_method) call(TLS_server_method)

#define KVPOOL_POINTER(name) inline decltype(&::name) name = nullptr;
KVPOOL_CRYPTO_CALLS(KVPOOL_POINTER)
KVPOOL_SSL_CALLS(KVPOOL_POINTER)
#undef KVPOOL_POINTER

// Whether the machine has OpenSSL 3. Any thread; the first call looks, and the library stays.
inline bool load_openssl() noexcept {
  static const bool IS_THERE = [] {
    void* const crypto = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    void* const ssl = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    bool is_whole = crypto != nullptr && ssl != nullptr;
#define KVPOOL_FIND(library, name) \
  name = is_whole ? reinterpret_cast<decltype(name)>(dlsym(library, #name)) : nullptr; \
  is_whole = name != nullptr;
#define KVPOOL_FIND_CRYPTO(name) KVPOOL_FIND(crypto, name)
#define KVPOOL_FIND_SSL(name) KVPOOL_FIND(ssl, name)
    KVPOOL_CRYPTO_CALLS(KVPOOL_FIND_CRYPTO)
    KVPOOL_SSL_CALLS(KVPOOL_FIND_SSL)
#undef KVPOOL_FIND_SSL
#undef KVPOOL_FIND_CRYPTO
#undef KVPOOL_FIND
    return is_whole;
  }();
  return IS_THERE;
}

}  // namespace kvpool

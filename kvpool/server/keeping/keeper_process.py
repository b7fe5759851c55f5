"""Keeper process: has the descriptors of a daemon's memory, so that the memory outlives the daemon. Run by file name.

    python -I -S keeper_process.py SECONDS           standard input: the listening socket, of packets

    request                 answer, or `no` and a reason
    (a connection)          ok PID         this connection is served; `no busy PID` while another one is
    hello SECONDS           ok             without a connection the keeper ends after so many seconds
    take                    ok NAME ...    with a descriptor for each
    give NAME               ok             came with one descriptor
    drop NAME ...           ok

It serves its own user and root, by the kernel (SO_PEERCRED), and maps none of the memory. It ends when it has nothing and
nobody, when nobody has come back in time, and by any signal: what it had is then free. It removes its socket's file, unless it
is killed, while it still listens: nobody puts another one there before it has ended. It is no child of the daemon, nor of its
process group or terminal. Of all processes it is the first that a machine without memory ends.

Imports a few modules of the standard library alone. One thread. Bounds: FILES_MAX descriptors, PACKET_BYTES a request.
"""

import os
import resource
import select
import signal
import socket
import struct
import sys
import time

FILES_MAX = 8
PACKET_BYTES = 1024
NAME_BYTES_MAX = 64
DESCRIPTORS_MIN = 64
FIRST_S = 60.0  # for the daemon that has started it to say hello
PAUSE_S = 0.1
_FD_BYTES = 4
_CREDENTIALS = struct.Struct("iII")


class Keeper:
    """What is kept, and for whom."""

    def __init__(self, listener: socket.socket, keep_s: float) -> None:
        self._listener = listener
        self._keep_s = keep_s
        self._kept: dict[str, int] = {}
        self._client: socket.socket | None = None
        self._client_pid = 0
        self._ends_at = time.monotonic() + min(keep_s, FIRST_S)

    def run(self) -> None:
        """Serve until there is nothing to do."""
        while True:
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            if self._client is not None:
                poll.register(self._client, select.POLLIN)
            left_s = None if self._client is not None else self._ends_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            ready = {descriptor for descriptor, _ in poll.poll(None if left_s is None else left_s * 1000 + 1)}
            if self._client is not None and self._client.fileno() in ready and not self._serve():
                self._leave_client()
                if not self._kept:
                    return
            elif self._listener.fileno() in ready:
                self._accept()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it has gone, or no descriptor is left for it
            time.sleep(PAUSE_S)
            return
        pid, uid, _ = _CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        is_served = uid in (0, os.geteuid())
        if not is_served or self._client is not None:
            _send(accepted, f"no busy {self._client_pid}" if is_served else "no it serves its own user and root alone")
            accepted.close()
            return
        self._client, self._client_pid = accepted, pid
        _send(accepted, f"ok {os.getpid()}")

    def _leave_client(self) -> None:
        assert self._client is not None
        self._client.close()
        self._client = None
        self._ends_at = time.monotonic() + self._keep_s

    def _serve(self) -> bool:
        """Answer one request; False where the client has gone."""
        assert self._client is not None
        try:
            packet, ancillary, flags, _ = self._client.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(FILES_MAX * _FD_BYTES))
        except OSError:
            return False
        descriptors = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
        taken = None
        if not packet:
            answer = ""
        elif flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            answer = "no it cannot take so many descriptors"
        else:
            answer, taken = self._answer(packet.decode("ascii", "replace").split(), descriptors)
        for descriptor in descriptors:
            if descriptor != taken:
                os.close(descriptor)
        return bool(answer) and _send(
            self._client, answer, [*self._kept.values()] if answer.startswith("ok take") else []
        )

    def _answer(self, words: list[str], descriptors: list[int]) -> tuple[str, int | None]:
        """The answer to a request, and the descriptor of it that is kept."""
        verb, arguments = (words or [""])[0], words[1:]
        if verb == "hello" and len(arguments) == 1 and arguments[0].isdecimal():
            self._keep_s = float(arguments[0])
            return "ok", None
        if verb == "take":
            return " ".join(["ok take", *self._kept]), None
        if verb == "give" and len(arguments) == len(descriptors) == 1:
            if arguments[0] in self._kept or len(arguments[0]) > NAME_BYTES_MAX or len(self._kept) >= FILES_MAX:
                return f"no it has {len(self._kept)} files, and one of this name or no room", None
            self._kept[arguments[0]] = descriptors[0]
            return "ok", descriptors[0]
        if verb == "drop":
            for name in arguments:
                if name in self._kept:
                    os.close(self._kept.pop(name))
            return "ok", None
        return f"no it does not know {verb[:NAME_BYTES_MAX]!r} with {len(descriptors)} descriptors", None


def _send(client: socket.socket, answer: str, descriptors: "list[int] | None" = None) -> bool:
    rights = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        if descriptors
        else []
    )
    try:
        client.sendmsg([answer.encode()], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        return  # it serves without


def _place_of(listener: socket.socket) -> "tuple[int, int] | None":
    """The file at a socket's path."""
    try:
        found = os.lstat(listener.getsockname())
    except OSError:
        return None
    return found.st_dev, found.st_ino


def main(keep_s: float) -> None:
    """Leave who has started it, and serve."""
    if os.fork():
        os._exit(0)
    os.chdir("/")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < DESCRIPTORS_MIN:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS_MIN, hard), hard))
    _write("/proc/self/comm", "kvpool-keeper")
    _write("/proc/self/oom_score_adj", "1000")
    listener = socket.socket(fileno=sys.stdin.fileno())
    place = _place_of(listener)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        Keeper(listener, keep_s).run()
    finally:
        if place and place == _place_of(listener):  # nobody else's, whose daemon has missed this one
            os.unlink(listener.getsockname())


if __name__ == "__main__":
    main(float(sys.argv[1]))

# The compiler of wheels: Zig's, which brings what it needs for each processor and each version of the C library. Its C++ library and its
# unwinder are linked statically. KVPOOL_ZIG and KVPOOL_PROCESSOR (x86_64, aarch64) are of the environment: scripts/make-wheel.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "$ENV{KVPOOL_PROCESSOR}")
set(zig "$ENV{KVPOOL_ZIG}")
set(CMAKE_CXX_COMPILER "${zig}" c++)
set(CMAKE_CXX_COMPILER_TARGET "${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28")
set(CMAKE_CXX_ARCHIVE_CREATE "\"${zig}\" ar qcD <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")

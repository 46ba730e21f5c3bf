# Instruments a CMake project without editing it:
#
#     cmake -DCMAKE_PROJECT_INCLUDE=/path/strap-access.cmake ...
#
# Every target is compiled with the flags of docs/ACCESS_TRACING.md. Every target is linked with
# the libstrap-access.so beside this file, which replaces the sanitizer's runtime.
include_guard(GLOBAL)
set(STRAP_ACCESS_GNU
  -fsanitize=thread --param=tsan-instrument-func-entry-exit=0
  -fno-builtin-memcpy -fno-builtin-memmove -fno-builtin-memset)
set(STRAP_ACCESS_CLANG
  -fsanitize=address
  "SHELL:-mllvm -asan-instrumentation-with-call-threshold=0 -mllvm -asan-opt=0"
  "SHELL:-mllvm -asan-stack=0 -mllvm -asan-globals=0")
foreach(language C CXX)
  add_compile_options(
    "$<$<COMPILE_LANG_AND_ID:${language},GNU>:${STRAP_ACCESS_GNU}>"
    "$<$<COMPILE_LANG_AND_ID:${language},Clang>:${STRAP_ACCESS_CLANG}>")
endforeach()
add_link_options(
  "LINKER:--wrap=memcpy,--wrap=memmove,--wrap=memset"
  "LINKER:--wrap=__memcpy_chk,--wrap=__memmove_chk,--wrap=__memset_chk")
link_libraries(${CMAKE_CURRENT_LIST_DIR}/libstrap-access.so)

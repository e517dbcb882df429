# Only in the Python package, which can hold no links. Programs ask the loader for libnccl.so.2: this gives what is built
# a folder with that name, to link with and to run with. What is installed must find one itself.
set(WINDLASS_FOLDER "${CMAKE_BINARY_DIR}/windlass")
file(MAKE_DIRECTORY "${WINDLASS_FOLDER}")
file(CREATE_LINK "${WINDLASS_PREFIX}/lib/windlass/libwindlass.so" "${WINDLASS_FOLDER}/libnccl.so.2" SYMBOLIC)
set(WINDLASS_LIBRARY "${WINDLASS_FOLDER}/libnccl.so.2")

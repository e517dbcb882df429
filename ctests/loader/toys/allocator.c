/* A preloaded allocator, for the loader like jemalloc: `free` is not libc's, so the real library must not be opened with
 * RTLD_DEEPBIND. */
#include <stddef.h>

extern void* __libc_malloc(size_t bytes);
extern void* __libc_calloc(size_t count, size_t bytes);
extern void* __libc_realloc(void* pointer, size_t bytes);
extern void __libc_free(void* pointer);

void* malloc(size_t bytes) { return __libc_malloc(bytes); }
void* calloc(size_t count, size_t bytes) { return __libc_calloc(count, bytes); }
void* realloc(void* pointer, size_t bytes) { return __libc_realloc(pointer, bytes); }
void free(void* pointer) { __libc_free(pointer); }

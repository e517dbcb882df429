/* What the driver says of addresses, queried by its own names: for programs that check what a cache of registrations relies on.
 * The driver is opened by name, so that such a program skips where there is none. */
#ifndef WINDLASS_CTESTS_DRIVER_ANSWERS_H
#define WINDLASS_CTESTS_DRIVER_ANSWERS_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned long long word;
struct location { int type, id; };
struct allocation_kind { int type, handle_types; struct location location; void* windows; uint8_t flags[8]; };
struct pool_kind { int type, handle_types; struct location location; void* windows; size_t bytes_max; uint8_t rest[56]; };
struct access { struct location location; int flags; };
struct bytes64 { char bytes[64]; };
_Static_assert(sizeof(struct allocation_kind) == 32 && sizeof(struct pool_kind) == 88, "as cuda.h has them");

enum { PINNED = 1, DEVICE = 1, DESCRIPTOR = 1, READ_WRITE = 3, RELEASE_THRESHOLD = 4, MANAGED_GLOBAL = 1 };
enum { MEMORY_TYPE = 2, BUFFER_ID = 7, IS_MANAGED, ORDINAL, LEGACY_IPC, RANGE_START, RANGE_BYTES, MAPPED, HANDLE_TYPES,
       POOL = 17, MAPPING_BYTES, MAPPING_START, BLOCK_ID };

#define FUNCTIONS(F)                                                                                                  \
  F(Init, unsigned) F(DeviceGetCount, int*) F(DeviceGetName, char*, int, int) F(DriverGetVersion, int*)               \
  F(DevicePrimaryCtxRetain, void**, int) F(CtxSetCurrent, void*) F(GetErrorName, int, const char**)                   \
  F(StreamCreate, void**, unsigned) F(StreamSynchronize, void*) F(StreamBeginCapture_v2, void*, int)                  \
  F(StreamEndCapture, void*, void**) F(GraphDestroy, void*) F(GraphInstantiateWithFlags, void**, void*, word)         \
  F(GraphLaunch, void*, void*) F(GraphExecDestroy, void*) F(MemsetD8Async, word, unsigned char, size_t, void*)        \
  F(PointerGetAttribute, void*, int, word) F(PointerGetAttributes, unsigned, int*, void**, word)                      \
  F(MemGetAddressRange_v2, word*, size_t*, word) F(MemRetainAllocationHandle, word*, void*)                           \
  F(MemAlloc_v2, word*, size_t) F(MemFree_v2, word) F(MemAllocManaged, word*, size_t, unsigned)                       \
  F(MemHostAlloc, void**, size_t, unsigned) F(MemFreeHost, void*) F(MemHostRegister_v2, void*, size_t, unsigned)      \
  F(MemHostUnregister, void*) F(MemGetAllocationGranularity, size_t*, const struct allocation_kind*, int)             \
  F(MemCreate, word*, size_t, const struct allocation_kind*, word) F(MemRelease, word)                                \
  F(MemAddressReserve, word*, size_t, size_t, word, word) F(MemAddressFree, word, size_t)                             \
  F(MemMap, word, size_t, size_t, word, word) F(MemUnmap, word, size_t)                                               \
  F(MemSetAccess, word, size_t, const struct access*, size_t) F(MemExportToShareableHandle, void*, word, int, word)   \
  F(MemImportFromShareableHandle, word*, void*, int) F(DeviceGetDefaultMemPool, void**, int)                          \
  F(MemPoolCreate, void**, const struct pool_kind*) F(MemPoolDestroy, void*) F(MemPoolTrimTo, void*, size_t)          \
  F(MemPoolSetAttribute, void*, int, void*) F(MemAllocAsync, word*, size_t, void*) F(MemFreeAsync, word, void*)       \
  F(MemAllocFromPoolAsync, word*, size_t, void*, void*) F(MemPoolExportToShareableHandle, void*, void*, int, word)    \
  F(MemPoolImportFromShareableHandle, void**, void*, int, word) F(MemPoolExportPointer, struct bytes64*, word)        \
  F(MemPoolImportPointer, word*, void*, struct bytes64*) F(MemPoolSetAccess, void*, const struct access*, size_t)     \
  F(IpcGetMemHandle, struct bytes64*, word) F(IpcOpenMemHandle_v2, word*, struct bytes64, unsigned)                   \
  F(IpcCloseMemHandle, word) F(StreamQuery, void*) F(CtxGetCurrent, void**) F(CtxSynchronize, void)                   \
  F(CtxEnablePeerAccess, void*, unsigned) F(StreamWaitValue32_v2, void*, word, unsigned, unsigned)                     \
  F(ModuleLoadData, void**, const void*) F(ModuleUnload, void*) F(ModuleGetFunction, void**, void*, const char*)      \
  F(LaunchKernel, void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**)
#define MEMBER(name, ...) int (*name)(__VA_ARGS__);
struct driver { FUNCTIONS(MEMBER) };

extern struct driver cu;
/* A non-blocking stream, the granularity of mappings, and the `handle_types` of what `created` makes. */
extern void* stream;
extern size_t granule;
extern int device_handle_types;
extern int checks, failures, known_count;
enum { MIB = 1 << 20 };

/* open_driver opens the driver, before any fork; start_driver initializes it, on the first GPU. Both skip the program where
 * there is none. */
void open_driver(void);
void start_driver(void);

#define CHECK(condition) check_that((condition), #condition, __LINE__)
void check_that(int holds, const char* text, int line);
/* A call that must succeed, else the program ends. */
#define CU(call) need(cu.call, #call, __LINE__)
void need(int code, const char* call, int line);
const char* name_of(int code);

/* What the driver says of one address. The allocation is the part that its range and its mapping share. With cuMemAlloc and
 * pools the range is the allocation, and the mapping the block that contains it. With mapped memory the mapping is the
 * allocation, and the range the whole reservation. cuMemGetAddressRange, which needs a context, returns that range. */
struct seen { int code; word id, start, bytes, block; };
/* The attribute `which`; zero where the driver has no value. */
word attribute(int which, word pointer, int* code);
struct seen see(word pointer);
/* Queries an address and prints the result. Addresses are printed as distances from `pointer`, so that two runs print the same. */
struct seen tell(word pointer, const char* format, ...) __attribute__((format(printf, 2, 3)));
/* Holds of a new allocation of `bytes` bytes that its id is unlike all before, that its first and last byte have the same id,
 * and that it begins at `pointer`. */
#define FRESH(pointer, bytes, ...) hold_new(tell(pointer, __VA_ARGS__), pointer, bytes)
struct seen hold_new(struct seen seen, word pointer, size_t bytes);
/* Holds that the driver says the same of `pointer` as before. */
void hold_same(struct seen before, word pointer);
/* Holds that no allocation has had this id. */
void hold_unknown(word id);

/* Makes device memory; maps it for reading and writing. */
word created(size_t bytes);
void map(word at, size_t bytes, word handle);
/* Whether pools can be handed to other processes. */
int has_shared_pools(void);

/* The process that exports memory to this one: `peer` runs in a child forked before `start_driver`. */
void peer_of_imports(int socket);
void imported_memory(int socket);

#endif

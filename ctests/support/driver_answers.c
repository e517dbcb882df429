/* What the driver answers: see driver_answers.h. */
#include "driver_answers.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct driver cu;
void* stream;
size_t granule;
int checks, failures, known_count, device_handle_types = DESCRIPTOR;

void check_that(int holds, const char* text, int line) {
  checks++;
  if (holds) return;
  failures++;
  printf("FAILED, line %d: %s\n", line, text);
}

const char* name_of(int code) {
  const char* name = "?";
  return !code ? "yes" : cu.GetErrorName(code, &name) ? "?" : name;
}

void need(int code, const char* call, int line) {
  if (!code) return;
  printf("FAILED, line %d: %s: %s\n", line, call, name_of(code));
  exit(1);
}

static void* needed(void* driver, const char* name) {
  void* found = dlsym(driver, name);
  if (!found) printf("skipped: the driver has no %s\n", name), exit(77);
  return found;
}

void open_driver(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) printf("skipped: %s\n", dlerror()), exit(77);
#define LOAD(name, ...) *(void**)&cu.name = needed(driver, "cu" #name);
  FUNCTIONS(LOAD)
}

void start_driver(void) {
  int devices = 0;
  if (cu.Init(0) || cu.DeviceGetCount(&devices) || !devices) printf("skipped: no GPU\n"), exit(77);
  void* context;
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(CtxSetCurrent(context));
  CU(StreamCreate(&stream, 1));
  struct allocation_kind kind = {PINNED, DESCRIPTOR, {DEVICE, 0}, NULL, {0}};
  CU(MemGetAllocationGranularity(&granule, &kind, 1));
}

int has_shared_pools(void) {
  struct pool_kind kind = {PINNED, DESCRIPTOR, {DEVICE, 0}, NULL, 0, {0}};
  void* pool;
  if (cu.MemPoolCreate(&pool, &kind)) return 0;
  CU(MemPoolDestroy(pool));
  return 1;
}

word attribute(int which, word pointer, int* code) {
  word value = 0;
  int answer = cu.PointerGetAttribute(&value, which, pointer);
  if (code) *code = answer;
  return answer ? 0 : value;
}

struct seen see(word pointer) {
  struct seen seen = {0};
  seen.id = attribute(BUFFER_ID, pointer, &seen.code);
  word range = attribute(RANGE_START, pointer, NULL), mapping = attribute(MAPPING_START, pointer, NULL);
  word range_end = range + attribute(RANGE_BYTES, pointer, NULL), mapping_end = mapping + attribute(MAPPING_BYTES, pointer, NULL);
  seen.start = range > mapping ? range : mapping;
  seen.bytes = (range_end < mapping_end ? range_end : mapping_end) - seen.start;
  seen.block = attribute(BLOCK_ID, pointer, NULL);
  /* Windlass queries all attributes in one call. That gives the same values, and for an unknown address zeros instead of an
   * error. */
  int asked[] = {BUFFER_ID, RANGE_START, RANGE_BYTES, MAPPING_START, MAPPING_BYTES};
  word answers[5] = {0};
  void* places[5];
  for (int i = 0; i < 5; i++) places[i] = &answers[i];
  CHECK(!cu.PointerGetAttributes(5, asked, places, pointer) && answers[0] == seen.id);
  CHECK(!seen.id || (answers[1] == range && answers[1] + answers[2] == range_end));
  CHECK(!seen.id || (answers[3] == mapping && answers[3] + answers[4] == mapping_end));
  return seen;
}

struct seen tell(word pointer, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vprintf(format, arguments);
  va_end(arguments);
  struct seen seen = see(pointer);
  word base = 0, handle = 0;
  size_t bytes = 0;
  int ranged = cu.MemGetAddressRange_v2(&base, &bytes, pointer);
  int retained = cu.MemRetainAllocationHandle(&handle, (void*)(uintptr_t)pointer);
  if (!retained) CU(MemRelease(handle));
#define ASK(which) attribute(which, pointer, NULL)
  if (seen.code) printf(": no id (%s)", name_of(seen.code));
  else {
    printf(": id %llu range %+lld, %llu; type %llu managed %llu legacy_ipc %llu handle_types %llu pool %s mapped %llu", seen.id,
           (long long)(ASK(RANGE_START) - pointer), ASK(RANGE_BYTES), ASK(MEMORY_TYPE), ASK(IS_MANAGED), ASK(LEGACY_IPC),
           ASK(HANDLE_TYPES), ASK(POOL) ? "yes" : "no", ASK(MAPPED));
    printf(" block %llu mapping %+lld, %llu", seen.block, (long long)(ASK(MAPPING_START) - pointer), ASK(MAPPING_BYTES));
  }
  if (ranged) printf("; address_range %s", name_of(ranged));
  else printf("; address_range %+lld, %zu", (long long)(base - pointer), bytes);
  printf("; retain %s\n", name_of(retained));
  return seen;
}

/* Ids that belonged to some allocation. */
static word known[4096];

static int is_known(word id) {
  for (int i = 0; i < known_count; i++)
    if (known[i] == id) return 1;
  return 0;
}

void hold_unknown(word id) {
  if (!id) return;
  CHECK(!is_known(id));
  if (known_count < 4096) known[known_count++] = id;
}

struct seen hold_new(struct seen seen, word pointer, size_t bytes) {
  CHECK(!seen.code && seen.id);
  hold_unknown(seen.id);
  CHECK(seen.start == pointer && seen.bytes >= bytes);
  word base = 0;
  size_t ranged = 0;
  CHECK(!cu.MemGetAddressRange_v2(&base, &ranged, pointer) && base == seen.start && ranged == seen.bytes);
  struct seen last = see(pointer + bytes - 1);
  CHECK(last.id == seen.id && last.start == seen.start && last.bytes == seen.bytes);
  return seen;
}

void hold_same(struct seen before, word pointer) {
  struct seen now = see(pointer);
  CHECK(!now.code && now.id == before.id && now.start == before.start && now.bytes == before.bytes);
}
word created(size_t bytes) {
  struct allocation_kind kind = {PINNED, device_handle_types, {DEVICE, 0}, NULL, {0}};
  word handle;
  CU(MemCreate(&handle, bytes, &kind, 0));
  return handle;
}

void map(word at, size_t bytes, word handle) {
  struct access all = {{DEVICE, 0}, READ_WRITE};
  CU(MemMap(at, bytes, 0, handle, 0));
  CU(MemSetAccess(at, bytes, &all, 1));
}


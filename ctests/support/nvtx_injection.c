/* A tool's library for NVTX, which NVTX_INJECTION64_PATH names. It keeps what it is told of the domain "NCCL", and checks that ranges nest
 * and that payloads have the schemas that were registered. What programs ask it is in nvtx_injection.h. */
#include "nvtx_injection.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CORE2 = 5, PUSH = 4, POP = 5, REGISTER = 10, CREATE = 12, SCHEMAS = 32, RANGES_MAX = 4096 };
static const uint64_t FIRST_SCHEMA = 1 << 24;

struct attributes { uint16_t version, size; uint32_t category; int32_t color_kind; uint32_t color; int32_t payload_kind, payloads; const void* payload;
                    int32_t message_kind; const char* message; };
struct payload { uint64_t schema; size_t size; const void* data; };
struct entry { uint64_t flags, kind; const char *name, *description; uint64_t detail, offset; const void *semantics, *reserved; };
struct schema { uint64_t fields; const char* name; uint64_t kind, flags; const struct entry* entries; size_t count, size, align; uint64_t number;
                const void* extension; };
struct segment { size_t number, count; void** places; };
struct module { uint16_t version, size, number, compatible; size_t count; const struct segment* segments; const void *export, *information; };
struct callbacks { size_t size; int (*table)(int, void**** table, unsigned* count); };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct schema schemas[SCHEMAS];
static struct range ranges[RANGES_MAX];
static int range_count, faults;
static char domain;
static _Thread_local int depth;

static int holds(int right, const char* what) {
  if (!right) fprintf(stderr, "NVTX: %s\n", what), faults++;
  return right;
}

static void* create(const char* name) {
  holds(!strcmp(name, "NCCL"), "the domain has another name");
  return &domain;
}

static const char* register_name(void* of, const char* name) {
  holds(of == &domain, "a name is of another domain");
  return strdup(name);
}

static uint64_t register_schema(void* of, const struct schema* schema) {
  holds(of == &domain, "a schema is of another domain");
  if (!holds(schema->number >= FIRST_SCHEMA && schema->number < FIRST_SCHEMA + SCHEMAS, "a schema has another number")) return 0;
  struct schema* kept = &schemas[schema->number - FIRST_SCHEMA];
  holds(!kept->number, "a schema is registered twice");
  *kept = *schema;
  const struct entry* entries = schema->entries;
  holds(schema->count >= 2 && !strcmp(entries[0].name, "NCCL communicator ID") && entries[0].kind == 18, "no communicator comes first");
  holds(schema->count >= 2 && !strcmp(entries[1].name, "Message size [bytes]") && entries[1].kind == 22, "no size comes second");
  for (size_t i = 1; i < schema->count; i++) holds(entries[i].offset > entries[i - 1].offset && entries[i].offset < schema->size, "an entry lies elsewhere");
  return schema->number;
}

static int push(void* of, const struct attributes* attributes) {
  const struct payload* payload = attributes->payload;
  holds(of == &domain, "a range is of another domain");
  holds(attributes->version == 3 && attributes->size == sizeof *attributes, "attributes have another size");
  holds(attributes->message_kind == 3, "a name is not registered");
  pthread_mutex_lock(&lock);
  if (holds(attributes->payloads == 1 && attributes->payload_kind == (int32_t)0xdfbd0009, "a payload is of another kind") &&
      range_count < RANGES_MAX) {
    const struct schema* schema = &schemas[payload->schema - FIRST_SCHEMA];
    holds(schema->number == payload->schema && schema->size == payload->size, "a payload has another size");
    struct range* range = &ranges[range_count++];
    *range = (struct range){.name = attributes->message};
    memcpy(&range->communicator, payload->data, payload->size);
  }
  pthread_mutex_unlock(&lock);
  return depth++;
}

static int pop(void* of) {
  holds(of == &domain && depth > 0, "a range ends that has not begun");
  return --depth;
}

int InitializeInjectionNvtx2(const void* (*export)(uint32_t)) {
  const struct callbacks* callbacks = export(1);
  void*** table = NULL;
  unsigned count = 0;
  for (int module = 1; module <= 6; module++) {
    if (!holds(callbacks->table(module, &table, &count), "there is no table")) return 0;
    if (module == CORE2 && holds(count == 16, "a table has another size"))
      *table[PUSH] = push, *table[POP] = pop, *table[REGISTER] = register_name, *table[CREATE] = create;
  }
  return 1;
}

int InitializeInjectionNvtxExtension(const struct module* module) {
  holds(module->version == 3 && module->size == sizeof *module && module->number == 2, "the module is another one");
  if (holds(module->count == 1 && module->segments->count == 63, "there are other places")) module->segments->places[0] = register_schema;
  return 1;
}

int nvtx_faults(void) { return faults + depth; }
int nvtx_ranges(void) { return range_count; }
struct range nvtx_range(int index) { return ranges[index]; }

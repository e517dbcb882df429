/* Device memory by its origin, on which depends whether NCCL can register it. */
#ifndef WINDLASS_CTESTS_MEMORY_H
#define WINDLASS_CTESTS_MEMORY_H

#include "harness.h"

enum origin {
  PLAIN,  /* cuMemAlloc: NCCL can register none */
  NCCLS,  /* ncclMemAlloc */
  MAPPED, /* virtual memory of the program's own: one handle that can be exported, mapped once */
};

struct memory {
  char* at;
  size_t bytes; /* as requested */
  enum origin origin;
};

/* Memory of the calling thread's device, for kernels of this rank, and of all ranks where they are threads. */
struct memory memory_alloc(const struct rank* self, enum origin origin, size_t bytes);
void memory_free(const struct rank* self, const struct memory* memory);

/* Gives freed memory that Windlass keeps back to the driver. */
void memory_return(void);

/* Virtual memory step by step. Sizes in bytes are rounded up to what can be mapped. The mapping alone keeps the handle's memory. */
char* addresses_reserve(const struct rank* self, size_t bytes);
void addresses_free(const struct rank* self, char* at, size_t bytes);
void memory_map(const struct rank* self, char* at, size_t bytes);
void memory_unmap(const struct rank* self, char* at, size_t bytes);

/* Bytes of the calling thread's device that are in use, by all processes. */
size_t memory_used(void);

#endif

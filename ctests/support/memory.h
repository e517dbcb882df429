/* Device memory by its origin: what NCCL can register depends on it. */
#ifndef WINDLASS_CTESTS_MEMORY_H
#define WINDLASS_CTESTS_MEMORY_H

#include "harness.h"

enum origin {
  PLAIN,  /* cuMemAlloc: NCCL can register none of it */
  NCCLS,  /* ncclMemAlloc */
  MAPPED, /* virtual memory of the program's own: one handle that can be exported, mapped once */
};

struct memory {
  char* at;
  size_t bytes; /* as asked for */
  enum origin origin;
};

/* Of the calling thread's device, for kernels of this rank and, where ranks are threads, of all. */
struct memory memory_alloc(const struct rank* self, enum origin origin, size_t bytes);
void memory_free(const struct rank* self, const struct memory* memory);

/* What Windlass keeps of memory that was freed goes back to the driver. */
void memory_return(void);

/* Virtual memory step by step. Sizes in bytes, rounded up to what can be mapped; the handle is gone with the mapping. */
char* addresses_reserve(const struct rank* self, size_t bytes);
void addresses_free(const struct rank* self, char* at, size_t bytes);
void memory_map(const struct rank* self, char* at, size_t bytes);
void memory_unmap(const struct rank* self, char* at, size_t bytes);

/* Bytes of the calling thread's device that are in use, by whatever process. */
size_t memory_used(void);

#endif

/* What the NVTX library of the tests answers about what it was told in this process. */
#ifndef WINDLASS_CTESTS_NVTX_INJECTION_H
#define WINDLASS_CTESTS_NVTX_INJECTION_H

#include <stdint.h>

/* A range with its payload; `more` has what its schema has behind the bytes. */
struct range { const char* name; uint64_t communicator, bytes; int32_t more[2]; };

int nvtx_faults(void);
int nvtx_ranges(void);
struct range nvtx_range(int index);

#endif

/* Writes a tuning table for Windlass. */
#ifndef WINDLASS_CTESTS_TUNING_H
#define WINDLASS_CTESTS_TUNING_H

#include <stdio.h>

#include "harness.h"

/* Begins this process's table, without a row. Call it before the first call of NCCL, which reads the table. NULL on failure. */
FILE* tuning_begin(const struct rank* self);
/* Writes a row for this number of ranks, on this kind of GPU, with and without multicast. */
void tuning_row(FILE* file, const struct rank* self, const char* collective, const char* key, const char* value);
void tuning_end(FILE* file);

#endif

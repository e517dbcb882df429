/* A tuning table for Windlass. */
#ifndef WINDLASS_CTESTS_TUNING_H
#define WINDLASS_CTESTS_TUNING_H

#include <stdio.h>

#include "harness.h"

/* This process's table, without a row yet: before the first call, which reads it. NULL where it cannot be made. */
FILE* tuning_begin(const struct rank* self);
/* A row for as many ranks as there are, on such GPUs, with and without multicast. */
void tuning_row(FILE* file, const struct rank* self, const char* collective, const char* key, const char* value);
void tuning_end(FILE* file);

#endif

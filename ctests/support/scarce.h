/* The functions of support/scarce.c, a preloaded library, for programs. */
#ifndef WINDLASS_CTESTS_SCARCE_H
#define WINDLASS_CTESTS_SCARCE_H

#include <stdbool.h>

/* From now on call number `first`, counted from 1, of Windlass's calls in this process that open a descriptor, map memory or
 * start a thread fails; with `and_later` all later ones, too, except openings for which a descriptor was closed. False where the
 * system allows no filter. */
bool scarce_begin(int first, bool and_later);
/* Ends that. Returns how many such calls there were. */
int scarce_end(void);

#endif

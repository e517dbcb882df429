/* What support/scarce.c, a library that is preloaded, lets a program ask for. */
#ifndef WINDLASS_CTESTS_SCARCE_H
#define WINDLASS_CTESTS_SCARCE_H

#include <stdbool.h>

/* From now on the `first` one of Windlass's calls in this process that open a descriptor, map memory or start a thread fails, counted
 * from 1, and all later ones where it is said: but those of descriptors for which one has been closed. False where this system does not let us. */
bool scarce_begin(int first, bool and_later);
/* No more. How many such calls there were. */
int scarce_end(void);

#endif

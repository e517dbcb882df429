/* What a process holds of the machine, to see that nothing grows: counted by the kernel and the driver, whoever took it. */
#ifndef WINDLASS_CTESTS_HELD_H
#define WINDLASS_CTESTS_HELD_H

#include <stdbool.h>
#include <stddef.h>

struct held {
  int descriptors, threads, mappings;
  size_t device_bytes; /* of the calling thread's device, of all processes */
};

struct held held_now(void);
/* Whether this process soon holds no more than before, `room` aside: what ends beside the program is waited for, ten seconds
 * at most. Says what is more. */
bool held_again(const struct held* before, const struct held* room);

#endif

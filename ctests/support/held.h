/* The resources of a process, to see that nothing grows: counted by the kernel and the driver, so whoever took them. */
#ifndef WINDLASS_CTESTS_HELD_H
#define WINDLASS_CTESTS_HELD_H

#include <stdbool.h>
#include <stddef.h>

struct held {
  int descriptors, threads, mappings;
  size_t device_bytes; /* of the calling thread's device, by all processes */
};

struct held held_now(void);
/* Whether this process holds no more than `before` plus `room`. Waits up to ten seconds for resources that are being freed;
 * prints what is more. */
bool held_again(const struct held* before, const struct held* room);

#endif

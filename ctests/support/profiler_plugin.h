/* What the profiler plugin of the tests answers about what it was told in this process. */
#ifndef WINDLASS_CTESTS_PROFILER_PLUGIN_H
#define WINDLASS_CTESTS_PROFILER_PLUGIN_H

#include <stdbool.h>
#include <stdint.h>

/* How many communicators were begun, and how many of them have not ended. */
int profiler_begun(void);
int profiler_living(void);
int profiler_faults(void);
/* How many events of a function there were: collectives or messages, not the program's calls. */
int profiler_told(const char* function);
/* How many of Windlass's collectives had not all channels that they had announced. With messages_too also anybody's messages. */
int profiler_untimed(bool messages_too);
/* What the newest living communicator is called in which this process is `rank`; 0 if there is none. */
uint64_t profiler_id(int rank);

#endif

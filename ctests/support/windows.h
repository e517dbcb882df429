/* Windows over memory of ncclMemAlloc, and gathers inside of them that are large enough to go to NCCL. */
#ifndef WINDLASS_CTESTS_WINDOWS_H
#define WINDLASS_CTESTS_WINDOWS_H

#include "gathers.h"

/* Bytes of one gather: its output, then its input. */
size_t window_room(const struct rank* self);
/* Registers a window over these bytes of a block. NULL where the machine supports no windows. */
ncclWindow_t window_over(ncclComm_t communicator, char* at, size_t bytes);
void window_end(ncclComm_t communicator, ncclWindow_t window);
/* Runs a gather whose buffers begin at `offset` in `memory` and take `window_room` bytes. */
void window_gather(struct rank* self, ncclComm_t communicator, const struct memory* memory, size_t offset, uint64_t key);
/* A block whose window has been used and deregistered. */
struct memory used_block(struct rank* self, ncclComm_t communicator, uint64_t key);
/* How many windows the simulator has made of this rank on a communicator in all, and how many are registered; -1 on GPUs. */
long long windows_made(ncclComm_t communicator);
long long windows_live(ncclComm_t communicator);
/* Whether this run is one that keeps windows: WINDLASS_POOL is set. */
bool windows_kept(void);
/* Runs the section `processes`, then `threads`, if chosen, of this many ranks. Runs nothing before NCCL 2.28.3. */
void windows_sections(int ranks, void (*all)(struct rank*));
/* Whether a line of Windlass's log (WINDLASS_LOG_FILE) contains both texts. */
bool log_says(const char* first, const char* second);

#endif

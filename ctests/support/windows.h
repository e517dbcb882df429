/* Windows over memory of ncclMemAlloc, and gathers within them that are NCCL's. */
#ifndef WINDLASS_CTESTS_WINDOWS_H
#define WINDLASS_CTESTS_WINDOWS_H

#include "gathers.h"

/* Bytes for one gather, its input behind its output. */
size_t window_room(const struct rank* self);
/* A window over these bytes of a block; a library may have none on this machine: then there is none. */
ncclWindow_t window_over(ncclComm_t communicator, char* at, size_t bytes);
void window_end(ncclComm_t communicator, ncclWindow_t window);
/* A gather whose buffers lie in `memory` from `offset` on, with `window_room` bytes there. */
void window_gather(struct rank* self, ncclComm_t communicator, const struct memory* memory, size_t offset, uint64_t key);
/* A block whose window has been used and deregistered. */
struct memory used_block(struct rank* self, ncclComm_t communicator, uint64_t key);
/* How many windows the simulator has made of this rank's on a communicator, ever, and how many live; -1 elsewhere. */
long long windows_made(ncclComm_t communicator);
long long windows_live(ncclComm_t communicator);
/* Whether Windlass is told to keep them. */
bool windows_kept(void);
/* The section `processes`, then `threads`, if chosen, of as many ranks: what all windows programs run. Nothing where NCCL has no windows. */
void windows_sections(int ranks, void (*all)(struct rank*));
/* Whether some line of Windlass's log, WINDLASS_LOG_FILE, has both. */
bool log_says(const char* first, const char* second);

#endif

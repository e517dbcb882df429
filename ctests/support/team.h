/* Teams: communicators of two or a few consecutive ranks of a section, one of each size on every rank, and what becomes of
 * them where they are lazy, that is, are built by NCCL only when a call needs it. */
#ifndef WINDLASS_CTESTS_TEAM_H
#define WINDLASS_CTESTS_TEAM_H

#include "collective.h"
#include "messages.h"

/* This rank's team; without a communicator it is in none. */
struct team { ncclComm_t communicator; int rank, ranks; };

/* Of a lazy communicator: no call needs NCCL; some call does; the program does not say. The runner holds the reports against what is
 * stated here (--unbuilt). */
enum build { UNBUILT, BUILT, EITHER };
/* States what becomes of one communicator of this rank, where communicators of `ranks` ranks are lazy. */
void expect_lazy(int ranks, enum build build);

/* Every `ranks` ranks of the section make a communicator; their number divides the section's. */
struct team team_made(struct rank* self, int ranks, enum build build);
/* An id for this rank's team, made by its first rank. */
ncclUniqueId team_id(struct rank* self, int ranks);
int team_next(const struct team* team);
int team_before(const struct team* team);

/* The next three call `together` equally often, also for a rank that is in no team: teams of any size may work at once. */
enum { TEAM_STEPS = 2 };
/* An all-reduce. */
void team_reduces(struct rank* self, const struct team* team, uint64_t key);
/* One collective of any kind; `what` says all but the ranks. */
void team_runs(struct rank* self, const struct team* team, struct transfer what);
/* Every rank sends to the next and receives from the one before, both at once. */
void team_passes(struct rank* self, const struct team* team, size_t bytes, uint64_t key);
/* Holds that count, rank, device and state are as they should. */
void team_knows_itself(struct rank* self, const struct team* team);

#endif

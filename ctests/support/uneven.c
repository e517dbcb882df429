/* Parts of different sizes: see uneven.h. */
#include "uneven.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "../../include/windlass.h"

enum { GAP = 3, GUARD = 0xa5 };

typedef ncclResult_t gather_function(const void*, void*, const size_t*, const size_t*, ncclDataType_t, ncclComm_t, cudaStream_t);
typedef ncclResult_t scatter_function(const void*, void*, const size_t*, const size_t*, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                                      cudaStream_t);

void* windlass_function(const char* name) { return dlsym(RTLD_DEFAULT, name); }

static unsigned char* at(const struct uneven* u, size_t element) { return u->memory + element * type_bytes(u->type); }

size_t uneven_total(const struct uneven* u) {
  size_t total = 0;
  for (int rank = 0; rank < u->ranks; rank++) total += u->counts[rank];
  return total;
}

int uneven_parts(const struct uneven* u) {
  int parts = 0;
  for (int rank = 0; rank < u->ranks; rank++) parts += u->counts[rank] > 0;
  return parts;
}

void uneven_prepare(struct uneven* u) {
  size_t end = u->packed ? 0 : GAP;
  for (int i = 0; i < u->ranks; i++) {
    int rank = u->packed ? i : u->ranks - 1 - i;
    u->displacements[rank] = end;
    end += u->counts[rank] + (u->packed ? 0 : GAP);
  }
  u->own = u->in_place ? u->displacements[u->rank] : end + GAP;
  u->bytes = (end + 2 * GAP + u->counts[u->rank]) * type_bytes(u->type);
  u->memory = device_alloc(u->bytes);
  uneven_fill(u);
}

/* For a reduce each part has inputs of its own, 1000 elements apart. */
static void give(const struct uneven* u, unsigned char* to, int part) {
  size_t first = u->reduces ? 1000 * (size_t)part : 0;
  input_fill(to, u->key, u->rank, first, u->counts[part], u->type, u->op);
}

static unsigned char* before(const struct uneven* u) {
  size_t element = type_bytes(u->type);
  unsigned char* host = malloc(u->bytes);
  memset(host, GUARD, u->bytes);
  if (!u->reduces) give(u, host + u->own * element, u->rank);
  for (int rank = 0; u->reduces && rank < u->ranks; rank++) give(u, host + u->displacements[rank] * element, rank);
  return host;
}

static unsigned char* after(const struct uneven* u) {
  size_t element = type_bytes(u->type);
  unsigned char* host = before(u);
  if (u->reduces) {
    reduced_fill(host + u->own * element, u->key, u->ranks, 1000 * (size_t)u->rank, u->counts[u->rank], u->type, u->op, 1);
  }
  for (int rank = 0; !u->reduces && rank < u->ranks; rank++) {
    input_fill(host + u->displacements[rank] * element, u->key, rank, 0, u->counts[rank], u->type, u->op);
  }
  return host;
}

void uneven_fill(const struct uneven* u) {
  unsigned char* host = before(u);
  upload(u->memory, host, u->bytes);
  free(host);
}

static void call(const struct uneven* u, int root, ncclComm_t communicator, cudaStream_t stream) {
  unsigned char *part = at(u, u->displacements[root]), *own = at(u, u->own);
  bool is_own = root == u->rank;
  if (u->reduces) {
    NCCL(ncclReduce(part, is_own ? own : part, u->counts[root], u->type, u->op, root, communicator, stream));
  } else {
    NCCL(ncclBroadcast(is_own ? own : part, part, u->counts[root], u->type, root, communicator, stream));
  }
}

void uneven_launch(const struct uneven* u, ncclComm_t communicator, CUstream stream) {
  NCCL(ncclGroupStart());
  for (int i = 0; i < u->ranks; i++) call(u, u->backwards ? u->ranks - 1 - i : i, communicator, as_cuda(stream));
  NCCL(ncclGroupEnd());
}

void uneven_launch_whole(const struct uneven* u, ncclComm_t communicator, CUstream stream) {
  gather_function* gather = NULL;
  scatter_function* scatter = NULL;
  *(void**)&gather = windlass_function("windlassAllGatherV");
  *(void**)&scatter = windlass_function("windlassReduceScatterV");
  if (!gather || !scatter) {
    struct uneven forwards = *u;
    forwards.backwards = false;
    uneven_launch(&forwards, communicator, stream);
    return;
  }
  const size_t* displacements = u->packed ? NULL : u->displacements;
  /* Windlass's function counts as the calls that it is made of. */
  count_calls("ncclGroupStart", 1);
  count_calls(u->reduces ? "ncclReduce" : "ncclBroadcast", u->ranks);
  count_calls("ncclGroupEnd", 1);
  ncclResult_t seen = u->reduces ? scatter(u->memory, at(u, u->own), u->counts, displacements, u->type, u->op, communicator, as_cuda(stream))
                                 : gather(at(u, u->own), u->memory, u->counts, displacements, u->type, communicator, as_cuda(stream));
  /* Makes as many checks as those calls would. */
  for (int i = 0; i < u->ranks + 2; i++) require_nccl(seen, "windlass's own function", __FILE__, __LINE__);
}

void uneven_verify(const struct uneven* u, struct rank* self) {
  unsigned char *seen = malloc(u->bytes), *wanted = after(u);
  download(seen, u->memory, u->bytes);
  size_t wrong = 0;
  while (wrong < u->bytes && seen[wrong] == wanted[wrong]) wrong++;
  if (!CHECK(wrong == u->bytes && "every byte is as it should be")) {
    fprintf(stderr, "  rank %d of %d: %s of %s, %s, key %llu: byte %zu of %zu is %02x, not %02x\n", u->rank, u->ranks,
            u->reduces ? "reduce-scatter-v" : "all-gather-v", type_name(u->type), u->in_place ? "in place" : "out of place",
            (unsigned long long)u->key, wrong, u->bytes, seen[wrong], wanted[wrong]);
  }
  record(self, seen, u->bytes);
  free(seen);
  free(wanted);
}

void uneven_release(struct uneven* u) { device_free(u->memory); }

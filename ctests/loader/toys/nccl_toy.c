/* A library that looks like NCCL to a loader and calls its own public names as the real one does: through the PLT,
 * from a thread of its own, and by a tail call. TOY_VERSION tells copies apart. */
#include <nccl.h>
#include <pthread.h>
#include <stddef.h>
#include <unistd.h>

/* How often the innermost function has run; the program reads it by name. */
int toy_broadcasts;
int toy_others;

struct ncclComm { unsigned long long magic; };
static struct ncclComm communicator = {0x0280028002800280};

ncclResult_t ncclGetVersion(int* version) {
  *version = TOY_VERSION;
  return ncclSuccess;
}

/* For -1 what libc, or a preload in its place, tells this library. */
const char* ncclGetErrorString(ncclResult_t result) {
  static char host[64];
  if ((int)result == -1 && gethostname(host, sizeof host) == 0) return host;
  return result == ncclSuccess ? "no error" : "an error";
}
const char* ncclGetLastError(ncclComm_t comm) { (void)comm; return ""; }

ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  (void)devlist;
  for (int i = 0; i < ndev; i++) comm[i] = &communicator;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { (void)comm; return ncclSuccess; }
static int own_rank = 0, rank_count = 1;
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { (void)comm; *count = rank_count; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { (void)comm; *rank = own_rank; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { (void)comm; *device = 0; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  (void)comm;
  *state = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }

ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  (void)buff, (void)count, (void)datatype, (void)root, (void)comm, (void)stream;
  __atomic_fetch_add(&toy_broadcasts, 1, __ATOMIC_RELAXED);
  return ncclSuccess;
}

/* Calls through the PLT. The statement after the call keeps it from being a tail call. */
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff;
  ncclResult_t result = ncclBcast(recvbuff, count, datatype, root, comm, stream);
  __atomic_fetch_add(&toy_others, 1, __ATOMIC_RELAXED);
  return result;
}

/* By a tail call: the return address that ncclBcast sees is not in this library. */
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)op;
  return ncclBcast(recvbuff, count, datatype, root, comm, stream);
}

static void* on_own_thread(void* comm) {
  ncclResult_t result = ncclBroadcast(NULL, NULL, 0, ncclInt8, 0, comm, NULL);
  __atomic_fetch_add(&toy_others, 1, __ATOMIC_RELAXED);
  return (void*)(size_t)result;
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream) {
  pthread_t thread;
  (void)sendbuff, (void)recvbuff, (void)sendcount, (void)datatype, (void)stream;
  if (pthread_create(&thread, NULL, on_own_thread, comm)) return ncclSystemError;
  pthread_join(thread, NULL);
  return ncclSuccess;
}

/* The next three functions check that the arguments are those of `ask`. */
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; i++) {
    if (id.internal[i] != (char)(i * 3 + 1)) return ncclInternalError;
  }
  if (nranks != 5 || rank != 3) return ncclInvalidArgument;
  own_rank = rank, rank_count = nranks;
  *comm = &communicator;
  return ncclSuccess;
}

ncclResult_t ncclPutSignal(const void* localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t window,
                           size_t offset, int signal, int context, unsigned int flags, ncclComm_t comm,
                           cudaStream_t stream) {
  int right = localbuff == (void*)0x101 && count == 0x10000000202 && datatype == ncclDouble && peer == 4 &&
              window == (ncclWindow_t)0x505 && offset == 0x60000000606 && signal == 7 && context == 8 && flags == 9 &&
              comm == (ncclComm_t)0xa0a && stream == (cudaStream_t)0xb0b;
  return right ? ncclSuccess : ncclInvalidArgument;
}

/* The toy with this version is an older library: it lacks the function that returns a structure. */
#if TOY_VERSION != 22802
struct team { int ranks, rank, stride; };
struct team ncclTeamWorld(ncclComm_t comm) { (void)comm; return (struct team){11, 22, 33}; }
#endif

/* What the driver says of a peer's memory: of allocations of another process, imported by descriptor, from its pool, and by
 * legacy IPC. */
#define _GNU_SOURCE
#include "driver_answers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Sends bytes to the other process, with a descriptor if there is one. */
static void send_to(int socket, const void* bytes, size_t count, int descriptor) {
  char control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec part = {(void*)bytes, count};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    struct cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != (ssize_t)count) printf("FAILED: the other process is gone\n"), exit(1);
}
static int receive_from(int socket, void* bytes, size_t count) {
  char control[CMSG_SPACE(sizeof(int))];
  struct iovec part = {bytes, count};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
  int descriptor = -1;
  if (recvmsg(socket, &message, MSG_WAITALL) != (ssize_t)count) printf("FAILED: the other process is gone\n"), exit(1);
  struct cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header && header->cmsg_type == SCM_RIGHTS) memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
  return descriptor;
}
static void turn(int socket) {
  char go = 1;
  send_to(socket, &go, 1, -1);
}
static void wait_turn(int socket) {
  char go;
  receive_from(socket, &go, 1);
}

static void export_pool(int socket) {
  struct pool_kind kind = {PINNED, DESCRIPTOR, {DEVICE, 0}, NULL, 0, {0}};
  struct bytes64 data;
  void* pool;
  int descriptor;
  word pointer;
  CU(MemPoolCreate(&pool, &kind));
  CU(MemPoolExportToShareableHandle(&descriptor, pool, DESCRIPTOR, 0));
  send_to(socket, "", 1, descriptor);
  close(descriptor);
  for (int round = 0; round < 2; round++) {
    CU(MemAllocFromPoolAsync(&pointer, 8 * MIB, pool, stream));
    CU(StreamSynchronize(stream));
    CU(MemPoolExportPointer(&data, pointer));
    send_to(socket, &data, sizeof(data), -1);
    wait_turn(socket);
    CU(MemFreeAsync(pointer, stream));
    CU(StreamSynchronize(stream));
  }
  wait_turn(socket);
  CU(MemPoolDestroy(pool));
}

/* The peer: makes memory of each kind twice, and frees it in between. */
void peer_of_imports(int socket) {
  struct bytes64 data;
  int descriptor;
  word pointer;
  for (int round = 0; round < 2; round++) {
    word handle = created(granule);
    CU(MemExportToShareableHandle(&descriptor, handle, DESCRIPTOR, 0));
    send_to(socket, "", 1, descriptor);
    close(descriptor);
    CU(MemRelease(handle));
    wait_turn(socket);
  }
  if (has_shared_pools()) export_pool(socket);
  for (int round = 0; round < 2; round++) {
    CU(MemAlloc_v2(&pointer, 8 * MIB));
    CU(IpcGetMemHandle(&data, pointer));
    send_to(socket, &data, sizeof(data), -1);
    wait_turn(socket);
    CU(MemFree_v2(pointer));
  }
}

static void import_pool(int socket) {
  struct access all = {{DEVICE, 0}, READ_WRITE};
  struct bytes64 data;
  word pointer, first = 0;
  char byte;
  void* pool;
  int descriptor = receive_from(socket, &byte, 1);
  CU(MemPoolImportFromShareableHandle(&pool, (void*)(uintptr_t)descriptor, DESCRIPTOR, 0));
  close(descriptor);
  CU(MemPoolSetAccess(pool, &all, 1));
  for (int round = 0; round < 2; round++) {
    receive_from(socket, &data, sizeof(data));
    CU(MemPoolImportPointer(&pointer, pool, &data));
    if (!round) first = pointer;
    struct seen seen = FRESH(pointer, 8 * MIB, "a peer's pool, number %d%s",
                             round, round && pointer == first ? " at the address" : "");
    CU(MemFreeAsync(pointer, stream));
    CU(StreamSynchronize(stream));
    printf("a peer's pool, freed here: its id %s\n", see(pointer).id == seen.id ? "is still told" : "is gone");
    turn(socket);
  }
  CU(MemPoolDestroy(pool));
  turn(socket);
}

void imported_memory(int socket) {
  struct bytes64 data;
  word base, handle, pointer, first = 0;
  char byte;
  CU(MemAddressReserve(&base, granule, 0, 0, 0));
  for (int round = 0; round < 2; round++) {
    int descriptor = receive_from(socket, &byte, 1);
    CU(MemImportFromShareableHandle(&handle, (void*)(uintptr_t)descriptor, DESCRIPTOR));
    close(descriptor);
    map(base, granule, handle);
    struct seen seen = FRESH(base, granule, "a peer's memory by descriptor, number %d at the address", round);
    turn(socket);
    CU(MemUnmap(base, granule));
    CHECK(see(base).id != seen.id);
    map(base, granule, handle);
    FRESH(base, granule, "the same mapped again");
    CU(MemUnmap(base, granule));
    CU(MemRelease(handle));
  }
  CU(MemAddressFree(base, granule));
  if (has_shared_pools()) import_pool(socket);
  for (int round = 0; round < 2; round++) {
    receive_from(socket, &data, sizeof(data));
    CU(IpcOpenMemHandle_v2(&pointer, data, 1));
    struct seen seen = FRESH(pointer, 8 * MIB, "a peer's memory by legacy IPC, number %d%s",
                             round, round && pointer == first ? " at the address" : "");
    first = pointer;
    CU(IpcCloseMemHandle(pointer));
    CHECK(see(pointer).id != seen.id);
    turn(socket);
  }
}

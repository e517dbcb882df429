/* Holds that port scanners and health checks that connect to the port in an id change nothing. They send other bytes and close,
 * at once or after a while, or reset the connection, while ranks wait for the others and before any rank has come. */
#include "../support/collective.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { VISITS = 40 };
static const char REQUEST[] = "GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n";

static int visitor(const ncclUniqueId* id) {
  struct sockaddr_storage address; /* of IPv4 or IPv6, as in an id of NCCL's */
  memset(&address, 0, sizeof address);
  memcpy(&address, id->internal + 8, sizeof(struct sockaddr_in6));
  socklen_t bytes = address.ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
  int socket_of_mine = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(!connect(socket_of_mine, (struct sockaddr*)&address, bytes));
  return socket_of_mine;
}

static void say(int socket_of_mine, const void* words, size_t bytes) {
  ssize_t sent = send(socket_of_mine, words, bytes, MSG_NOSIGNAL); /* the other side may have closed it */
  (void)sent;
}

static void visit(const ncclUniqueId* id) {
  int stay[VISITS];
  char zeros[4096] = {0};
  for (int i = 0; i < VISITS; i++) {
    stay[i] = visitor(id);
    say(stay[i], i % 2 ? zeros : REQUEST, i % 2 ? sizeof zeros : sizeof REQUEST - 1);
    int leaves = visitor(id);
    if (i % 2) {
      struct linger reset = {1, 0};
      CHECK(!setsockopt(leaves, SOL_SOCKET, SO_LINGER, &reset, sizeof reset));
    } else {
      say(leaves, REQUEST, sizeof REQUEST - 1);
    }
    close(leaves);
  }
  for (int i = 0; i < VISITS; i++) close(stay[i]);
}

static void all(struct rank* self) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, 0, 0);
  if (self->rank == 0) visit(&id);
  meet(self);
  if (self->rank == 1) {
    usleep(100000); /* time for the other ranks to wait for this one */
    visit(&id);
  }
  NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 5003, .rank = self->rank,
                              .ranks = self->ranks, .key = 1};
  transfer_run(&transfer, communicator, self);
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("unknown connections", 60);
  run_ranks("unknown connections", PROCESSES, rank_count(3), all, NULL);
  return finish();
}

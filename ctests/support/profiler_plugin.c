/* A profiler plugin of interface VERSION, 4 to 7, written from what NCCL's documentation says of it. It checks what it is told and complains
 * on standard error: one communicator and rank is begun once and ended once, parents are events of the right kind, collectives are numbered
 * without gaps, channels come with their collective, as many as it has announced, with times that can be, every event ends once.
 * With CTESTS_NO_CHANNELS it does not ask for channels, with CTESTS_CHANNEL_MS it takes so long for each. CTESTS_TRACE names a file for a trace in Chrome's format, with %d for the process.
 * What programs ask it is in profiler_plugin.h. */
#define _GNU_SOURCE
#include "profiler_plugin.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { GROUP = 1, COLL = 2, P2P = 4, KERNEL_CH = 64, GROUP_API = 256, COLL_API = 512, P2P_API = 1024, KERNEL_LAUNCH = 2048 };
enum { CONTEXTS_MAX = 4096, EVENTS_MAX = 1 << 17, FUNCTIONS_MAX = 16, MAGIC = 0x50524f46 };

struct descriptor {
  uint64_t kind; /* one byte in version 4 */
  void* parent;
  int rank;
  union {
    struct { uint64_t number; const char* function; const void* send; void* receive; size_t count; int root; const char* type;
             uint8_t channels, warps; const char *algorithm, *protocol; void* group; } coll;
    struct { const char* function; void* buffer; const char* type; size_t count; int peer; uint8_t channels; void* group; } p2p;
    struct { const char* function; size_t count; const char* type; int root; void* stream; bool is_captured; } coll_api;
    struct { const char* function; size_t count; const char* type; void* stream; bool is_captured; } p2p_api;
    struct { bool is_captured; int depth; } group_api;
    struct { uint8_t channel; uint64_t time; } kernel_ch;
  };
};

struct context { int magic, rank, ranks; uint64_t id; bool lives; int open; uint64_t numbers[FUNCTIONS_MAX]; };
struct event { int magic; uint64_t kind; struct context* context; struct event* parent; bool has_ended, is_captured, is_windlass; double begun, ended;
               int channels; uint64_t times[2]; size_t count; const char* name; long thread; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[CONTEXTS_MAX];
static struct event events[EVENTS_MAX];
static int begun, ended, faults, told;
static const char* functions[FUNCTIONS_MAX];
static int counts[FUNCTIONS_MAX];

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time); /* as the device's times are told */
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static bool holds(bool right, const char* what) {
  if (!right) {
    fprintf(stderr, "profiler plugin, version %d: %s\n", VERSION, what);
    faults++;
  }
  return right;
}

static int number_of(const char* function) {
  for (int i = 0; i < FUNCTIONS_MAX; i++) {
    if (!functions[i]) functions[i] = strdup(function);
    if (!strcmp(functions[i], function)) return i;
  }
  abort();
}

static void write_trace(void) {
  const char* pattern = getenv("CTESTS_TRACE");
  if (!pattern) return;
  char path[4096];
  snprintf(path, sizeof path, pattern, (int)getpid());
  FILE* file = fopen(path, "w");
  if (!file) return;
  fprintf(file, "[");
  for (int i = 0; i < told; i++) {
    const struct event* event = &events[i];
    /* A channel has the device's times, a thread of its own in the trace, and its call's name. */
    const bool is_device = event->kind == KERNEL_CH && event->parent;
    const struct event* call = is_device ? event->parent : event;
    double begin = is_device ? (double)event->times[0] / 1e3 : event->begun, end = is_device ? (double)event->times[1] / 1e3 : event->ended;
    fprintf(file, "%s{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%ld,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"communicator\":\"%016lx\",\"rank\":%d,\"count\":%zu}}",
            i ? ",\n" : "", call->name, is_device ? "device" : "host", (int)getpid(), is_device ? 0 : event->thread, begin, end - begin, call->context->id,
            call->context->rank, call->count);
  }
  fprintf(file, "]\n");
  fclose(file);
}

typedef void (*logger)(int level, unsigned long subsystems, const char* file, int line, const char* format, ...);

static bool asks_for_channels(void) { return !getenv("CTESTS_NO_CHANNELS"); }

static int begin(void** context, int* mask, uint64_t id, int ranks, int rank, logger log) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < begun; i++)
    holds(!contexts[i].lives || contexts[i].id != id || contexts[i].rank != rank, "a communicator and rank is begun twice");
  holds(rank >= 0 && rank < ranks, "a rank is none");
  if (holds(log != NULL, "there is no logger")) log(3, ~0ul, __FILE__, __LINE__, "rank %d of %d begins", rank, ranks);
  if (begun == CONTEXTS_MAX) abort();
  contexts[begun] = (struct context){.magic = MAGIC, .rank = rank, .ranks = ranks, .id = id, .lives = true};
  *context = &contexts[begun++];
  *mask = (VERSION == 4 ? GROUP : GROUP_API | COLL_API | P2P_API) | COLL | P2P | (asks_for_channels() ? KERNEL_CH : 0);
  pthread_mutex_unlock(&lock);
  return 0;
}

#if VERSION == 4
static int init(void** context, int* mask, const char* name, uint64_t id, int hosts, int ranks, int rank, logger log) {
#else
static int init(void** context, uint64_t id, int* mask, const char* name, int hosts, int ranks, int rank, logger log) {
#endif
  (void)name;
  holds(hosts == 1, "there is another host");
  return begin(context, mask, id, ranks, rank, log);
}

static bool is_event(const struct event* event, uint64_t kinds) {
  return !event || (event >= events && event < events + EVENTS_MAX && event->magic == MAGIC && event->kind & kinds);
}

static int start(void* own, void** handle, struct descriptor* of) {
  uint64_t kind = VERSION == 4 ? *(uint8_t*)&of->kind : of->kind;
  struct context* context = own;
  struct event* parent = of->parent;
  if (kind == KERNEL_CH && getenv("CTESTS_CHANNEL_MS")) usleep((useconds_t)atoi(getenv("CTESTS_CHANNEL_MS")) * 1000);
  pthread_mutex_lock(&lock);
  if (told == EVENTS_MAX) abort();
  struct event event = {.magic = MAGIC, .kind = kind, .context = context, .parent = parent, .begun = now(), .name = "group", .thread = gettid()};
  holds(context && context->magic == MAGIC && context->lives, "an event has no communicator");
  /* NCCL fills in the rank of these only: NCCL 2.30.7's events of kernels have rank 0. */
  holds(context->rank == of->rank || (kind != COLL && kind != P2P), "an event is of another rank");
  switch (kind) {
    case COLL: {
      int function = number_of(of->coll.function);
      event.is_windlass = of->coll.algorithm && !strcmp(of->coll.algorithm, "WINDLASS");
      /* Version 4 does not say what is captured. */
      if (event.is_windlass && VERSION > 4 && parent) holds(of->coll.channels == (asks_for_channels() && !parent->is_captured && of->coll.count), "a collective announces other channels");
      event.name = functions[function], event.channels = of->coll.channels, event.count = of->coll.count;
      holds(of->coll.number == context->numbers[function]++, "a collective's number is not the next one");
      holds(of->coll.type && !strncmp(of->coll.type, "nccl", 4), "a type has no name");
      holds(is_event(parent, VERSION == 4 ? GROUP : COLL_API), "a collective has another parent");
      holds(parent, "a collective has no parent");
      if (VERSION > 4) holds(is_event(of->coll.group, GROUP), "a collective's group is none");
      counts[function]++;
      break;
    }
    case P2P: {
      int function = number_of(of->p2p.function);
      event.name = functions[function], event.channels = of->p2p.channels, event.count = of->p2p.count;
      holds(is_event(parent, VERSION == 4 ? GROUP : P2P_API), "a message has another parent");
      holds(parent, "a message has no parent");
      holds(of->p2p.peer >= 0 && of->p2p.peer < context->ranks, "a message's peer is none");
      if (VERSION > 4) holds(is_event(of->p2p.group, GROUP), "a message's group is none");
      counts[function]++;
      break;
    }
    case COLL_API:
      event.name = functions[number_of(of->coll_api.function)], event.count = of->coll_api.count;
      event.is_captured = of->coll_api.is_captured;
      holds(parent && is_event(parent, GROUP_API), "a call is in no group");
      break;
    case P2P_API:
      event.name = functions[number_of(of->p2p_api.function)], event.count = of->p2p_api.count;
      holds(parent && is_event(parent, GROUP_API), "a call is in no group");
      break;
    case KERNEL_CH:
      event.name = "channel", event.times[0] = of->kernel_ch.time;
      holds(parent && is_event(parent, COLL | P2P), "a channel has another parent");
      holds(parent && parent->channels-- > 0, "a channel was not announced");
      break;
    case GROUP_API:
      holds(of->group_api.depth > 0, "a group has no depth");
      break;
    case GROUP:
      break;
    default:
      holds(false, "an event is of a kind that nobody asked for");
  }
  if (parent && kind != KERNEL_CH) holds(parent->context->lives, "a parent is of an ended communicator");
  context->open++;
  events[told] = event;
  *handle = &events[told++];
  pthread_mutex_unlock(&lock);
  return 0;
}

static int stop(void* handle) {
  struct event* event = handle;
  pthread_mutex_lock(&lock);
  if (holds(event && is_event(event, ~0ull), "what ends is no event")) {
    holds(!event->has_ended, "an event ends twice");
    event->has_ended = true;
    holds(event->kind != KERNEL_CH || event->times[1], "a channel ends without a time");
    event->ended = now();
    event->context->open--;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

static int record(void* handle, int state, void* arguments) {
  pthread_mutex_lock(&lock);
  holds(handle && is_event(handle, state == 22 ? KERNEL_CH : GROUP_API), "a state is of another event");
  holds(state == 22 || state == 23 || state == 24, "a state is none");
  if (state == 22) {
    struct event* channel = handle;
    channel->times[1] = *(uint64_t*)arguments;
    holds(channel->times[0] > 0 && channel->times[1] >= channel->times[0], "a channel stops before it starts");
    double microseconds = (double)(channel->times[1] - channel->times[0]) / 1e3, seconds_ago = (double)time(NULL) - (double)channel->times[0] / 1e9;
    if (channel->parent->is_windlass) {
      holds(microseconds < now() - channel->parent->begun + 1000, "a channel takes longer than its collective can have");
      holds(seconds_ago > -2 && seconds_ago < 200, "a channel starts at another time");
    }
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

static int finalize(void* own) {
  struct context* context = own;
  pthread_mutex_lock(&lock);
  if (holds(context && context->magic == MAGIC && context->lives, "what is ended is no communicator")) {
    holds(context->open == 0, "a communicator ends before its events");
    context->lives = false;
    if (++ended == begun) write_trace();
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

struct { const char* name; void *init, *start, *stop, *record, *finalize; } PROFILER_SYMBOL = {
    "ctests", init, start, stop, record, finalize};

int profiler_begun(void) { return begun; }
int profiler_living(void) { return begun - ended; }
int profiler_faults(void) { return faults; }
int profiler_untimed(bool messages_too) {
  int untimed = 0;
  for (int i = 0; i < told; i++) untimed += events[i].channels > 0 && (events[i].is_windlass || (messages_too && events[i].kind == P2P));
  return untimed;
}
int profiler_told(const char* function) { return counts[number_of(function)]; }
uint64_t profiler_id(int rank) {
  for (int i = begun - 1; i >= 0; i--)
    if (contexts[i].lives && contexts[i].rank == rank) return contexts[i].id;
  return 0;
}

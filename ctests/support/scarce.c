/* Preloaded before Windlass: lets Windlass's k-th call that opens a descriptor, maps memory or starts a thread fail, and on request
 * all such calls after it. Calls of the program and of NCCL do not count and do not fail.
 *
 * Windlass makes system calls itself. A seccomp filter raises SIGSYS for those from Windlass's text, and the handler answers
 * them. */
#define _GNU_SOURCE
#include "scarce.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static uintptr_t text, text_end;
static atomic_int armed, seen, kth, forever, closed;

enum what { DESCRIPTOR, OTHER };
enum course { PASSES, FAILS, TAKES_CLOSED };

/* Whether this call fails. Later calls that open a descriptor pass for each descriptor that has been closed since. */
static enum course course_of(enum what what) {
  if (!atomic_load(&armed)) return PASSES;
  int number = atomic_fetch_add(&seen, 1) + 1, first = atomic_load(&kth);
  if (number <= first || !atomic_load(&forever)) return number == first ? FAILS : PASSES;
  if (what == OTHER) return FAILS;
  int there = atomic_load(&closed);
  while (there > 0 && !atomic_compare_exchange_weak(&closed, &there, there - 1)) {}
  return there > 0 ? TAKES_CLOSED : FAILS;
}

static bool fails(enum what what) { return course_of(what) == FAILS; }

static bool is_windlass(const void* address) { return (uintptr_t)address >= text && (uintptr_t)address < text_end; }

static void on_call(int signal, siginfo_t* info, void* context) {
  (void)signal;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  enum course course = course_of(info->si_syscall == SYS_mmap ? OTHER : DESCRIPTOR);
  if (course == FAILS) {
    registers[REG_RAX] = info->si_syscall == SYS_mmap ? -ENOMEM : -EMFILE;
    return;
  }
  int before = errno;
  long result = syscall(info->si_syscall, registers[REG_RDI], registers[REG_RSI], registers[REG_RDX], registers[REG_R10],
                        registers[REG_R8], registers[REG_R9]);
  registers[REG_RAX] = result < 0 ? -errno : result;
  /* No descriptor was opened (accept4 found nobody), so the closed one stays available. */
  if (result < 0 && course == TAKES_CLOSED) atomic_fetch_add(&closed, 1);
  errno = before;
}

static int find_text(struct dl_phdr_info* object, size_t size, void* inside) {
  (void)size;
  for (int i = 0; i < object->dlpi_phnum; i++) {
    const ElfW(Phdr)* part = &object->dlpi_phdr[i];
    uintptr_t from = object->dlpi_addr + part->p_vaddr, to = from + part->p_memsz;
    if (part->p_type != PT_LOAD || !(part->p_flags & PF_X) || (uintptr_t)inside < from || (uintptr_t)inside >= to) continue;
    text = from, text_end = to;
    return 1;
  }
  return 0;
}

static bool filter(void) {
  static const int calls[] = {SYS_socket, SYS_socketpair, SYS_accept4, SYS_memfd_create, SYS_eventfd2, SYS_epoll_create1, SYS_pidfd_open,
                              SYS_mmap, SYS_openat, SYS_dup};
  enum { CALLS = sizeof calls / sizeof *calls };
  struct sock_filter program[CALLS + 10];
  size_t at = 0;
  const uint32_t ip = offsetof(struct seccomp_data, instruction_pointer);
  /* The filter compares the upper halves of addresses once, so they must be equal in all of the text. */
  if (text >> 32 != (text_end - 1) >> 32) return false;
  program[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, ip + 4);
  program[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(text >> 32), 0, CALLS + 4);
  program[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, ip);
  program[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (uint32_t)text, 0, CALLS + 2);
  program[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (uint32_t)text_end, CALLS + 1, 0);
  program[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
  for (int i = 0; i < CALLS; i++) {
    program[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls[i], (uint8_t)(CALLS - i), 0);
  }
  program[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  program[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
  struct sock_fprog whole = {.len = (unsigned short)at, .filter = program};
  return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &whole);
}

bool scarce_begin(int first, bool and_later) {
  static bool is_ready;
  if (!is_ready) {
    void* inside = dlsym(RTLD_DEFAULT, "windlassGetVersion");
    if (!inside || !dl_iterate_phdr(find_text, inside)) return false;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_call;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    if (sigaction(SIGSYS, &action, NULL) || !filter()) return false;
    is_ready = true;
  }
  atomic_store(&seen, 0);
  atomic_store(&closed, 0);
  atomic_store(&kth, first);
  atomic_store(&forever, and_later);
  atomic_store(&armed, 1);
  return true;
}

int scarce_end(void) {
  atomic_store(&armed, 0);
  return atomic_load(&seen);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
  static int (*next)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (is_windlass(__builtin_return_address(0)) && fails(OTHER)) return EAGAIN;
  if (!next) next = (int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*))dlsym(RTLD_NEXT, "pthread_create");
  return next(thread, attributes, body, argument);
}

int open64(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  mode_t mode = va_arg(list, mode_t);
  va_end(list);
  if (is_windlass(__builtin_return_address(0)) && fails(DESCRIPTOR)) {
    errno = EMFILE;
    return -1;
  }
  return openat(AT_FDCWD, path, flags, mode);
}

int close(int number) {
  bool counts = atomic_load(&armed) && atomic_load(&seen) >= atomic_load(&kth) && is_windlass(__builtin_return_address(0));
  int result = (int)syscall(SYS_close, number);
  if (counts) atomic_fetch_add(&closed, 1);
  return result;
}

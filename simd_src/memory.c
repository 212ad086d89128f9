/* memory: locking, NUMA placement and their observation, by system call: libnuma would be one more thing to install. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/mempolicy.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory_api.h"

#define NODE_BITS 65 /* the kernel takes one more than it reads */

static int error_of(long result) { return result < 0 ? errno : 0; }

int fm_memory_lock(const void *address, size_t bytes) { return error_of(mlock(address, bytes)); }

int fm_memory_interleave(const void *address, size_t bytes, unsigned long nodes) {
    return error_of(syscall(SYS_mbind, address, bytes, MPOL_INTERLEAVE, &nodes, NODE_BITS, 0));
}

int fm_memory_interleave_thread(unsigned long nodes) {
    if (nodes == 0) return error_of(syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0));
    return error_of(syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, &nodes, NODE_BITS));
}

int fm_memory_nodes(const void **address, int count, int *node) {
    return error_of(syscall(SYS_move_pages, 0, (unsigned long)count, address, NULL, node, 0));
}

int fm_memory_resident(const void *address, size_t bytes, unsigned char *resident) {
    return error_of(mincore((void *)address, bytes, resident));
}

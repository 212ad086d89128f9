/* Where memory lies and whether it may leave: what Python's mmap cannot ask the kernel for. Prototypes only, read by
 * the compiler and by the Python binding.
 *
 * All return 0, or the error number that the kernel gave. nodes: a bit for each NUMA node below 64. */

/* Keeps the pages of a range in memory until it is unmapped (mlock), reading those that are not there yet. */
int fm_memory_lock(const void *address, size_t bytes);

/* Deals the pages of a range out to nodes in turns, those that are not there yet (mbind). */
int fm_memory_interleave(const void *address, size_t bytes, unsigned long nodes);

/* The same for all pages that the calling thread brings in from now on, those of files too (set_mempolicy); nodes 0:
 * no more. */
int fm_memory_interleave_thread(unsigned long nodes);

/* node[i]: where the page of address[i] lies, or a negative error number (-ENOENT: not in this process yet). */
int fm_memory_nodes(const void **address, int count, int *node);

/* resident[i]: 1 if page i of the range (4 KB, page-aligned) is in memory, for instance in the page cache. */
int fm_memory_resident(const void *address, size_t bytes, unsigned char *resident);

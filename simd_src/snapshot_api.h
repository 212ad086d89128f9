/* Copies between a sequence's state and the prefix cache, and the memory they go to (snapshot.c). Prototypes only, read
 * by the compiler and by the Python binding. */

/* Copies bytes[i] bytes from from[i] to to[i] (not overlapping), i < count, with all threads of a pool. */
void fm_snapshot_copy(fm_pool *pool, int count, void *const *to, const void *const *from, const size_t *bytes);

/* Has the system put memory behind a range, as writing to each of its pages would. The bytes stay as they are, also those
 * that other threads write meanwhile. advice: MADV_POPULATE_WRITE, a third of the time of one fault a page; where the
 * kernel does not know it, each page is touched. */
void fm_snapshot_touch(void *address, size_t bytes, int advice);

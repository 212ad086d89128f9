/* Trials of the thread pool (pool_trial.c), for its tests and benchmarks. Prototypes only, read by the compiler and by
 * the Python binding. A trial makes a pool of `threads` (pinned to cpus, or NULL), runs `jobs` jobs and destroys it. */

/* Each item of each job adds 1 to visits[item] and 1 to worker_items[its worker], after spinning for spin_cycles.
 * Seconds the jobs took; -1 if the pool cannot be made; -2 if a job returned before all its items were done. */
double fm_pool_trial(int threads, const int *cpus, int jobs, int items, int spin_cycles, int *visits,
                     int *worker_items);
/* A job within a job: ends the process with a message (for a child process to try). */
void fm_pool_trial_nested(int threads);
/* Forks while a pool lives; the child runs a job on it and destroys it. 0 if the child did both. */
int fm_pool_trial_fork(int threads);

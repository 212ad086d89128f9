/* Timing of the vision tower (vision_trial.c), for `fermion bench vision`. Prototypes only, read by the compiler and by
 * the Python binding. */
#ifndef FERMION_VISION_TRIAL_API_H
#define FERMION_VISION_TRIAL_API_H


/* Threads of a trial's own: see threads.h. */
fm_pool *fm_pool_create(int threads, const int *cpus);
void fm_pool_destroy(fm_pool *pool);

/* Float multiply-adds a second of all threads of the pool that do nothing else, from registers: what the tower could
 * reach at most. 0 if memory is short or this build or CPU lacks the tier. */
double fm_vision_peak(const char *tier, fm_pool *pool);

#endif

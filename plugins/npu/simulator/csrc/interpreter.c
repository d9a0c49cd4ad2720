/* Python's lock, let go of while a thread waits for another one's kernel, whose formula is Python.
 *
 * torch_npu waits with it held in some calls: real kernels do not need it. It is taken again without sim_mutex in hand,
 * which threads take that hold it. */
#include "sim.h"

#include <dlfcn.h>

void *sim_let_go(void)
{
    int (*held)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    void *(*save)(void) = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    return held && save && held() ? save() : NULL;
}

void sim_take_again(void *state)
{
    void (*restore)(void *) = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    restore(state);
}

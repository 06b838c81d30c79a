// SPDX-License-Identifier: GPL-2.0-only
/*
 * mountain_bugs: does wrong what the debug kernels are there to find, one thing each time it is loaded
 * (which=...), and refuses to stay. An empty log says something only where these are in it: see
 * kernel/tests/99-debug-finds.sh. Never for a machine that somebody uses.
 */
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

static char *which = "";
module_param(which, charp, 0);
MODULE_PARM_DESC(which, "use-after-free, rcu, sleep, object, leak, locks or race");

static DEFINE_MUTEX(first);
static DEFINE_MUTEX(second);
static DEFINE_SPINLOCK(spin);
static int __rcu *pointer;
static unsigned long counter;

static void use_after_free(void)
{
	char *memory = kmalloc(64, GFP_KERNEL);

	if (!memory)
		return;
	OPTIMIZER_HIDE_VAR(memory);
	kfree(memory);
	WRITE_ONCE(memory[8], 1);
}

/* A reader that holds nothing. */
static void rcu(void)
{
	(void)rcu_dereference(pointer);
}

static void sleep(void)
{
	spin_lock(&spin);
	might_sleep();
	spin_unlock(&spin);
}

static void nothing(struct work_struct *work)
{
}

/* Freed with its timer running. The tracker stops the timer before it is gone. */
static void object(void)
{
	struct delayed_work *work = kzalloc(sizeof(*work), GFP_KERNEL);

	if (!work)
		return;
	INIT_DELAYED_WORK(work, nothing);
	schedule_delayed_work(work, 60 * HZ);
	kfree(work);
}

static void leak(void)
{
	void *memory = kmalloc(4096, GFP_KERNEL);

	OPTIMIZER_HIDE_VAR(memory);
}

/* One order, then the other: nobody waits, but somebody could. */
static void locks(void)
{
	mutex_lock(&first);
	mutex_lock(&second);
	mutex_unlock(&second);
	mutex_unlock(&first);
	mutex_lock(&second);
	mutex_lock(&first);
	mutex_unlock(&first);
	mutex_unlock(&second);
}

static int counts(void *unused)
{
	while (!kthread_should_stop()) {
		counter++;
		barrier();
		cond_resched();
	}
	return 0;
}

static void race(void)
{
	struct task_struct *threads[2];
	int n;

	for (n = 0; n < 2; n++)
		threads[n] = kthread_run(counts, NULL, "bugs/%d", n);
	msleep(5000);
	for (n = 0; n < 2; n++)
		if (!IS_ERR(threads[n]))
			kthread_stop(threads[n]);
}

static const struct {
	const char *name;
	void (*make)(void);
} bugs[] = {
	{ "use-after-free", use_after_free },
	{ "rcu", rcu },
	{ "sleep", sleep },
	{ "object", object },
	{ "leak", leak },
	{ "locks", locks },
	{ "race", race },
};

static int __init mountain_bugs_init(void)
{
	int n;

	for (n = 0; n < ARRAY_SIZE(bugs); n++) {
		if (!strcmp(which, bugs[n].name)) {
			bugs[n].make();
			return -ECANCELED;
		}
	}
	return -EINVAL;
}
module_init(mountain_bugs_init);

MODULE_DESCRIPTION("What the debug kernels of the mountain project have to find");
MODULE_LICENSE("GPL");

// SPDX-License-Identifier: GPL-2.0-only
/* The series' BBR: its source file, copied here by tests/kernels/bbr-off. */
#define BBR_OFF_INCLUDES
#include "bbr_off.h"
#include "tcp_bbr_patched.c"

static void set_delta(unsigned int value)
{
	delta = value;
}

BBR_OFF_VARIANT(bbr_off_patched, set_delta);

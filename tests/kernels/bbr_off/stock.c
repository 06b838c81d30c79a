// SPDX-License-Identifier: GPL-2.0-only
/* The unpatched kernel's BBR: its source file, copied here by tests/kernels/bbr-off. */
#define BBR_OFF_INCLUDES
#include "bbr_off.h"
#include "tcp_bbr_stock.c"

BBR_OFF_VARIANT(bbr_off_stock, NULL);

// SPDX-License-Identifier: GPL-2.0-only
#define BBR_OFF_INCLUDES
#include "bbr_off.h"
#include "tcp_bbr_stock.c"

BBR_OFF_VARIANT(bbr_off_stock, NULL);

// SPDX-License-Identifier: GPL-2.0-only
/*
 * Which next hops a route takes, by COUNT look-ups of 5-tuples that are random but always the same:
 *
 *   choices COUNT PREFIX [DEVICE PREFIX]
 *
 * to addresses of PREFIX (the first 16 bits of an IPv4 address, "10.1", or the first 64 of an IPv6 one,
 * "2001:db8:1:0"), TCP and UDP by turns. With a DEVICE the packets come in there, from addresses of the
 * second PREFIX: forwarded.
 *
 * Prints a hash of all choices, then "DEVICE NUMBER" for each device that was chosen, in order of names.
 */
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static struct {
	struct nlmsghdr nl;
	struct rtmsg rt;
	char attributes[256];
} message;

static char answer[8192];
static unsigned int times[256];
static int fd, family;

static uint64_t random_bits(void)
{
	static uint64_t x = 88172645463325252ULL;

	/* xorshift64 */
	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return x;
}

static void put(int type, const void *data, size_t length)
{
	struct rtattr *attr = (void *)((char *)&message + NLMSG_ALIGN(message.nl.nlmsg_len));

	attr->rta_type = type;
	attr->rta_len = RTA_LENGTH(length);
	memcpy(RTA_DATA(attr), data, length);
	message.nl.nlmsg_len = NLMSG_ALIGN(message.nl.nlmsg_len) + RTA_ALIGN(attr->rta_len);
}

static void put_address(int type, const char *prefix)
{
	uint64_t bits = random_bits();
	unsigned char address[16];
	char text[64];

	snprintf(text, sizeof(text), family == AF_INET ? "%s.0.0" : "%s::", prefix);
	if (inet_pton(family, text, address) != 1)
		errx(2, "not a prefix: %s", prefix);
	if (family == AF_INET) {
		address[2] = bits;
		address[3] = bits >> 8 | 1;
	} else {
		memcpy(address + 8, &bits, 8);
	}
	put(type, address, family == AF_INET ? 4 : 16);
}

static void put_flow(int i)
{
	uint64_t bits = random_bits();
	uint16_t from = htons(1024 + (uint16_t)bits % 60000);
	uint16_t to = htons(1 + (uint16_t)(bits >> 16) % 60000);
	uint8_t protocol = i % 2 ? IPPROTO_UDP : IPPROTO_TCP;

	put(RTA_IP_PROTO, &protocol, sizeof(protocol));
	put(RTA_SPORT, &from, sizeof(from));
	put(RTA_DPORT, &to, sizeof(to));
}

/* The device of the route that the kernel answers with. */
static int look_up(void)
{
	struct nlmsghdr *nl = (void *)answer;
	struct rtattr *attr;
	ssize_t length;
	int left;

	if (send(fd, &message, message.nl.nlmsg_len, 0) < 0)
		err(1, "send");
	length = recv(fd, answer, sizeof(answer), 0);
	if (length < 0)
		err(1, "recv");
	if (nl->nlmsg_type == NLMSG_ERROR)
		errx(1, "no route: %s", strerror(-((struct nlmsgerr *)NLMSG_DATA(nl))->error));
	left = nl->nlmsg_len - NLMSG_LENGTH(sizeof(struct rtmsg));
	for (attr = RTM_RTA((struct rtmsg *)NLMSG_DATA(nl)); RTA_OK(attr, left);
	     attr = RTA_NEXT(attr, left)) {
		if (attr->rta_type == RTA_OIF)
			return *(int *)RTA_DATA(attr);
	}
	errx(1, "a route without a device");
}

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct if_nameindex *)a)->if_name,
		      ((const struct if_nameindex *)b)->if_name);
}

int main(int argc, char **argv)
{
	struct if_nameindex *devices, *device;
	uint64_t hash = 0xcbf29ce484222325ULL;
	int count, i, oif, iif = 0;
	char name[IF_NAMESIZE];

	if (argc != 3 && argc != 5)
		errx(2, "usage: choices COUNT PREFIX [DEVICE PREFIX]");
	count = atoi(argv[1]);
	family = strchr(argv[2], ':') ? AF_INET6 : AF_INET;
	if (argc == 5) {
		iif = if_nametoindex(argv[3]);
		if (!iif)
			err(2, "%s", argv[3]);
	}
	fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
	if (fd < 0)
		err(1, "socket");
	for (i = 0; i < count; i++) {
		memset(&message, 0, sizeof(message));
		message.nl.nlmsg_len = NLMSG_LENGTH(sizeof(struct rtmsg));
		message.nl.nlmsg_type = RTM_GETROUTE;
		message.nl.nlmsg_flags = NLM_F_REQUEST;
		message.rt.rtm_family = family;
		message.rt.rtm_dst_len = family == AF_INET ? 32 : 128;
		put_address(RTA_DST, argv[2]);
		put_flow(i);
		if (iif) {
			message.rt.rtm_src_len = message.rt.rtm_dst_len;
			put_address(RTA_SRC, argv[4]);
			put(RTA_IIF, &iif, sizeof(iif));
		}
		oif = look_up();
		times[oif & 255]++;
		/* By name: numbers of devices differ from run to run. FNV-1a. */
		if (!if_indextoname(oif, name))
			err(1, "device %d", oif);
		for (const char *c = name; *c; c++)
			hash = (hash ^ (unsigned char)*c) * 0x100000001b3ULL;
	}
	printf("%016llx\n", (unsigned long long)hash);
	devices = if_nameindex();
	if (!devices)
		err(1, "if_nameindex");
	for (i = 0; devices[i].if_index; i++)
		;
	qsort(devices, i, sizeof(*devices), by_name);
	for (device = devices; device->if_index; device++) {
		if (times[device->if_index & 255])
			printf("%s %u\n", device->if_name, times[device->if_index & 255]);
	}
	return 0;
}

// SPDX-License-Identifier: GPL-2.0-only
/*
 * Rules of the module mountain_redirect, straight by generic netlink:
 *
 *   mtnrule add ID udp|tcp FROM PORT TO PORT [IFINDEX]
 *   mtnrule del [ID]                          without a number: all
 *   mtnrule get                               "ID FORWARD-PACKETS REPLY-PACKETS DROPS" a line
 *
 * Exit code: 0, or the errno that the kernel answered.
 */
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <linux/genetlink.h>
#include <linux/netlink.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../module/mountain_redirect/uapi.h"

static struct {
	struct nlmsghdr nl;
	struct genlmsghdr genl;
	char attributes[512];
} message;

static char answer[65536];
static int fd;

static void begin(int family, int command, int flags)
{
	memset(&message, 0, sizeof(message));
	message.nl.nlmsg_len = NLMSG_LENGTH(GENL_HDRLEN);
	message.nl.nlmsg_type = family;
	message.nl.nlmsg_flags = NLM_F_REQUEST | flags;
	message.genl.cmd = command;
	message.genl.version = 1;
}

static void put(int type, const void *data, int len)
{
	struct nlattr *nla = (void *)((char *)&message + NLMSG_ALIGN(message.nl.nlmsg_len));

	nla->nla_type = type;
	nla->nla_len = NLA_HDRLEN + len;
	memcpy((char *)nla + NLA_HDRLEN, data, len);
	message.nl.nlmsg_len = NLMSG_ALIGN(message.nl.nlmsg_len) + NLA_ALIGN(nla->nla_len);
}

static void put_end(int address, const char *text, int port, const char *number)
{
	unsigned char bytes[16];
	uint16_t be = htons(atoi(number));

	if (inet_pton(AF_INET, text, bytes) == 1)
		put(address, bytes, 4);
	else if (inet_pton(AF_INET6, text, bytes) == 1)
		put(address, bytes, 16);
	else
		put(address, bytes, 5);	/* the kernel's to refuse */
	put(port, &be, sizeof(be));
}

static const void *find(const struct nlmsghdr *nl, int type)
{
	const char *at = (const char *)nl + NLMSG_LENGTH(GENL_HDRLEN);
	const char *end = (const char *)nl + nl->nlmsg_len;

	while (at + NLA_HDRLEN <= end) {
		const struct nlattr *nla = (const void *)at;

		if (nla->nla_len < NLA_HDRLEN)
			break;
		if ((nla->nla_type & NLA_TYPE_MASK) == type)
			return at + NLA_HDRLEN;
		at += NLA_ALIGN(nla->nla_len);
	}
	return NULL;
}

static uint64_t number(const struct nlmsghdr *nl, int type)
{
	const void *at = find(nl, type);
	uint64_t value = 0;

	if (at)
		memcpy(&value, at, sizeof(value));
	return value;
}

static void show(const struct nlmsghdr *nl)
{
	const void *id = find(nl, MTN_REDIRECT_A_ID);
	uint32_t value = 0;

	if (id)
		memcpy(&value, id, sizeof(value));
	printf("%u %llu %llu %llu\n", value,
	       (unsigned long long)number(nl, MTN_REDIRECT_A_FORWARD_PACKETS),
	       (unsigned long long)number(nl, MTN_REDIRECT_A_REPLY_PACKETS),
	       (unsigned long long)number(nl, MTN_REDIRECT_A_DROPS_MEMORY));
}

/* Sends the message and reads up to its end; returns the errno, and the family's id in @family. */
static int talk(int *family)
{
	if (send(fd, &message, message.nl.nlmsg_len, 0) < 0)
		err(1, "send");
	for (;;) {
		struct nlmsghdr *nl = (void *)answer;
		int len = recv(fd, answer, sizeof(answer), 0);

		if (len < 0)
			err(1, "recv");
		for (; NLMSG_OK(nl, len); nl = NLMSG_NEXT(nl, len)) {
			if (nl->nlmsg_type == NLMSG_ERROR || nl->nlmsg_type == NLMSG_DONE) {
				int code;

				memcpy(&code, NLMSG_DATA(nl), sizeof(code));
				return -code;
			}
			if (nl->nlmsg_type == GENL_ID_CTRL) {
				const void *id = find(nl, CTRL_ATTR_FAMILY_ID);
				uint16_t value = 0;

				if (id)
					memcpy(&value, id, sizeof(value));
				*family = value;
			} else {
				show(nl);
			}
		}
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_nl kernel = { .nl_family = AF_NETLINK };
	const char *what = argc > 1 ? argv[1] : "";
	int family = 0, code;

	fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC);
	if (fd < 0 || connect(fd, (void *)&kernel, sizeof(kernel)))
		err(1, "netlink");
	begin(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, NLM_F_ACK);
	put(CTRL_ATTR_FAMILY_NAME, MTN_REDIRECT_FAMILY, sizeof(MTN_REDIRECT_FAMILY));
	code = talk(&family);
	if (code)
		return code;

	if (!strcmp(what, "add") && argc >= 8) {
		uint8_t proto = !strcmp(argv[3], "tcp") ? IPPROTO_TCP : IPPROTO_UDP;
		uint32_t id = strtoul(argv[2], NULL, 0);
		int32_t ifindex;

		begin(family, MTN_REDIRECT_CMD_NEW, NLM_F_ACK);
		put(MTN_REDIRECT_A_ID, &id, sizeof(id));
		put(MTN_REDIRECT_A_PROTO, &proto, sizeof(proto));
		put_end(MTN_REDIRECT_A_FROM, argv[4], MTN_REDIRECT_A_FROM_PORT, argv[5]);
		put_end(MTN_REDIRECT_A_TO, argv[6], MTN_REDIRECT_A_TO_PORT, argv[7]);
		if (argc > 8) {
			ifindex = atoi(argv[8]);
			put(MTN_REDIRECT_A_IFINDEX, &ifindex, sizeof(ifindex));
		}
	} else if (!strcmp(what, "del")) {
		uint32_t id;

		begin(family, MTN_REDIRECT_CMD_DEL, NLM_F_ACK);
		if (argc > 2) {
			id = strtoul(argv[2], NULL, 0);
			put(MTN_REDIRECT_A_ID, &id, sizeof(id));
		}
	} else if (!strcmp(what, "get")) {
		begin(family, MTN_REDIRECT_CMD_GET, NLM_F_DUMP);
	} else {
		errx(1, "usage: mtnrule add ID udp|tcp FROM PORT TO PORT [IFINDEX] | del [ID] | get");
	}
	code = talk(&family);
	if (code)
		warnx("%s", strerror(code));
	return code;
}

// SPDX-License-Identifier: GPL-2.0-only
/*
 * Datagrams whose checksums are looked at, and trains of them:
 *
 *   udp_talk serve ADDRESS PORT [nocheck]
 *       answers each with what it had, and says "LENGTH SUM" of it, where SUM is `right` or `wrong` if the
 *       kernel still has the packet's own sum (CHECKSUM_COMPLETE, by IP_CHECKSUM: IPv4 only), else `none`
 *   udp_talk ask ADDRESS PORT LENGTH [nocheck]
 *       sends one and says from whom the answer came: "ADDRESS PORT". Exit code: 1 if there was none
 *   udp_talk zero SOURCE SPORT ADDRESS PORT TO TO-PORT
 *       the same, IPv4, with a checksum that would be 0 if it were made for TO and TO-PORT
 *   udp_talk trains ADDRESS PORT COUNT SEGMENTS LENGTH
 *       sends COUNT trains, each in one call, which the kernel or the device cuts up (UDP_SEGMENT)
 *
 * `nocheck` sends without a checksum.
 */
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#define IP_CHECKSUM_OPTION	23
#define UDP_NO_CHECK6_TX_OPTION	101
#define UDP_NO_CHECK6_RX_OPTION	102
#define UDP_SEGMENT_OPTION	103

static unsigned char data[65536], answer[65536];
static int fd;

static socklen_t parse(const char *text, const char *port, struct sockaddr_storage *address)
{
	struct sockaddr_in *v4 = (void *)address;
	struct sockaddr_in6 *v6 = (void *)address;

	memset(address, 0, sizeof(*address));
	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(atoi(port));
		return sizeof(*v4);
	}
	if (inet_pton(AF_INET6, text, &v6->sin6_addr) != 1)
		errx(2, "not an address: %s", text);
	v6->sin6_family = AF_INET6;
	v6->sin6_port = htons(atoi(port));
	return sizeof(*v6);
}

static void open_socket(int family, int nocheck)
{
	struct timeval patience = { .tv_sec = 5 };
	int on = 1;

	fd = socket(family, SOCK_DGRAM, 0);
	if (fd < 0)
		err(2, "socket");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	if (family == AF_INET6)
		setsockopt(fd, IPPROTO_UDP, UDP_NO_CHECK6_RX_OPTION, &on, sizeof(on));
	if (!nocheck)
		return;
	if (family == AF_INET6 ?
	    setsockopt(fd, IPPROTO_UDP, UDP_NO_CHECK6_TX_OPTION, &on, sizeof(on)) :
	    setsockopt(fd, SOL_SOCKET, SO_NO_CHECK, &on, sizeof(on)))
		err(2, "no checksum");
}

static uint32_t add(uint32_t sum, const void *bytes, size_t length)
{
	const unsigned char *p = bytes;
	size_t i;

	for (i = 0; i < length; i++)
		sum += i % 2 ? p[i] : p[i] << 8;
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* As the kernel has it: in the order of the bytes in memory. */
static const char *judge(struct msghdr *message, ssize_t length)
{
	struct cmsghdr *cmsg;
	uint16_t half[2];

	for (cmsg = CMSG_FIRSTHDR(message); cmsg; cmsg = CMSG_NXTHDR(message, cmsg)) {
		if (cmsg->cmsg_level != SOL_IP || cmsg->cmsg_type != IP_CHECKSUM_OPTION)
			continue;
		memcpy(half, CMSG_DATA(cmsg), sizeof(half));
		/* 0 and 0xffff are the same. */
		return add(0, half, 4) % 0xffff == add(0, answer, length) % 0xffff ? "right" : "wrong";
	}
	return "none";
}

static void serve(void)
{
	struct sockaddr_storage peer;
	char control[256];
	struct iovec iov = { .iov_base = answer, .iov_len = sizeof(answer) };
	struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t n;

	for (;;) {
		message.msg_name = &peer;
		message.msg_namelen = sizeof(peer);
		message.msg_control = control;
		message.msg_controllen = sizeof(control);
		n = recvmsg(fd, &message, 0);
		if (n < 0)
			continue;
		printf("%zd %s\n", n, judge(&message, n));
		fflush(stdout);
		if (sendto(fd, answer, n, 0, (void *)&peer, message.msg_namelen) != n)
			warn("sendto");
	}
}

static int ask(const struct sockaddr_storage *to, socklen_t to_length, size_t length)
{
	struct sockaddr_storage peer;
	socklen_t peer_length = sizeof(peer);
	char text[INET6_ADDRSTRLEN];
	ssize_t n;

	if (sendto(fd, data, length, 0, (const void *)to, to_length) != (ssize_t)length)
		err(2, "sendto");
	n = recvfrom(fd, answer, sizeof(answer), 0, (void *)&peer, &peer_length);
	if (n < 0)
		return 1;
	if ((size_t)n != length || memcmp(data, answer, n))
		errx(2, "another answer");
	if (peer.ss_family == AF_INET)
		inet_ntop(AF_INET, &((struct sockaddr_in *)&peer)->sin_addr, text, sizeof(text));
	else
		inet_ntop(AF_INET6, &((struct sockaddr_in6 *)&peer)->sin6_addr, text, sizeof(text));
	printf("%s %d\n", text, ntohs(((struct sockaddr_in *)&peer)->sin_port));
	return 0;
}

static void trains(const struct sockaddr_storage *to, socklen_t to_length, int count, int segments, int length)
{
	ssize_t whole = segments * length;

	if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT_OPTION, &length, sizeof(length)))
		err(2, "UDP_SEGMENT");
	while (count--)
		if (sendto(fd, data, whole, 0, (const void *)to, to_length) != whole)
			err(2, "sendto");
}

int main(int argc, char **argv)
{
	struct sockaddr_storage address, from, goal;
	const struct sockaddr_in *v4;
	socklen_t length;
	int on = 1, i;

	for (i = 0; i < (int)sizeof(data); i++)
		data[i] = i * 7 + (i >> 8);
	if (argc >= 4 && argc <= 5 && !strcmp(argv[1], "serve")) {
		length = parse(argv[2], argv[3], &address);
		open_socket(address.ss_family, argc == 5);
		if (address.ss_family == AF_INET)
			setsockopt(fd, SOL_IP, IP_CHECKSUM_OPTION, &on, sizeof(on));
		if (bind(fd, (void *)&address, length))
			err(2, "bind");
		serve();
	} else if (argc >= 5 && argc <= 6 && !strcmp(argv[1], "ask")) {
		length = parse(argv[2], argv[3], &address);
		open_socket(address.ss_family, argc == 6);
		return ask(&address, length, atoi(argv[4]));
	} else if (argc == 7 && !strcmp(argv[1], "trains")) {
		length = parse(argv[2], argv[3], &address);
		open_socket(address.ss_family, 0);
		trains(&address, length, atoi(argv[4]), atoi(argv[5]), atoi(argv[6]));
		return 0;
	} else if (argc == 8 && !strcmp(argv[1], "zero")) {
		uint16_t rest, header[] = { htons(IPPROTO_UDP), htons(8 + 100), htons(8 + 100) };
		uint32_t sum;

		length = parse(argv[2], argv[3], &from);
		parse(argv[6], argv[7], &goal);
		parse(argv[4], argv[5], &address);
		open_socket(AF_INET, 0);
		if (bind(fd, (void *)&from, length))
			err(2, "bind");
		/* The first two bytes make up for all that is summed but the checksum itself. */
		memset(data, 0, 2);
		sum = add(0, data, 100);
		sum = add(sum, header, sizeof(header));
		for (v4 = (void *)&from; v4; v4 = v4 == (void *)&from ? (void *)&goal : NULL) {
			sum = add(sum, &v4->sin_addr, 4);
			sum = add(sum, &v4->sin_port, 2);
		}
		rest = htons(0xffff - sum);
		memcpy(data, &rest, 2);
		return ask(&address, length, 100);
	}
	errx(2, "usage: see the source");
}

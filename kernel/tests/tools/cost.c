// SPDX-License-Identifier: GPL-2.0-only
/*
 * What a system call costs, in the guest's ns: in virtual time (shift=0), instructions.
 *
 *   cost send COUNT ADDRESS    UDP datagrams of 64 bytes to port 9 of an IPv4 or IPv6 address
 *   cost connect COUNT PREFIX  UDP connect() to addresses of PREFIX.0.0/16 in turn: a route look-up each
 *   cost nothing COUNT         getppid(): what the loop and the system call cost
 *
 * Prints ns for each, after a tenth of COUNT to warm up.
 */
#include <arpa/inet.h>
#include <err.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct sockaddr_storage address;
static socklen_t address_len;
static int fd;

static double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static void parse(const char *text)
{
	struct sockaddr_in *v4 = (void *)&address;
	struct sockaddr_in6 *v6 = (void *)&address;

	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(9);
		address_len = sizeof(*v4);
	} else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(9);
		address_len = sizeof(*v6);
	} else {
		errx(2, "not an address: %s", text);
	}
	fd = socket(address.ss_family, SOCK_DGRAM, 0);
	if (fd < 0)
		err(1, "socket");
}

static void nothing(long i)
{
	(void)i;
	syscall(SYS_getppid);
}

static void send_one(long i)
{
	static const char data[64];

	(void)i;
	if (sendto(fd, data, sizeof(data), 0, (void *)&address, address_len) < 0)
		err(1, "sendto");
}

static void connect_one(long i)
{
	struct sockaddr_in *v4 = (void *)&address;

	v4->sin_addr.s_addr = htonl((ntohl(v4->sin_addr.s_addr) & 0xffff0000) | (i * 40503 & 0xffff));
	if (connect(fd, (void *)&address, address_len) < 0)
		err(1, "connect");
}

int main(int argc, char **argv)
{
	void (*what)(long i) = nothing;
	double start;
	char text[64];
	long count, i;

	if (argc < 3)
		errx(2, "usage: cost send|connect|nothing COUNT [ADDRESS]");
	count = atol(argv[2]);
	if (count < 10)
		errx(2, "too few: %s", argv[2]);
	if (!strcmp(argv[1], "send") && argc == 4) {
		parse(argv[3]);
		what = send_one;
	} else if (!strcmp(argv[1], "connect") && argc == 4) {
		snprintf(text, sizeof(text), "%s.0.0", argv[3]);
		parse(text);
		what = connect_one;
	} else if (strcmp(argv[1], "nothing")) {
		errx(2, "usage: cost send|connect|nothing COUNT [ADDRESS]");
	}
	for (i = 0; i < count / 10; i++)
		what(i);
	start = now_ns();
	for (i = 0; i < count; i++)
		what(i);
	printf("%.2f\n", (now_ns() - start) / count);
	return 0;
}

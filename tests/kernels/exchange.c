// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * A TCP connection with a congestion control of one's own, for cc.sh:
 *
 *   exchange listen|connect CONTROL ADDRESS PORT <SENT >RECEIVED
 *
 * CONTROL "-" is the system's choice. Both ends send and receive at once, until both have sent all. The
 * congestion control that the connection had is the one line on standard error. And
 *
 *   exchange answer ADDRESS PORT TEXT
 *
 * sends each UDP datagram back with TEXT in front, until it is killed.
 */
#include <arpa/inet.h>
#include <err.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void copy(int from, int to)
{
	static char buffer[65536];
	ssize_t n;

	while ((n = read(from, buffer, sizeof(buffer))) > 0)
		for (ssize_t done = 0, m; done < n; done += m)
			if ((m = write(to, buffer + done, n - done)) < 0)
				err(3, "write");
	if (n < 0)
		err(3, "read");
}

static struct sockaddr_in place(const char *address, const char *port)
{
	struct sockaddr_in place = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };

	if (inet_pton(AF_INET, address, &place.sin_addr) != 1)
		errx(2, "not an address: %s", address);
	return place;
}

static void answer(struct sockaddr_in at, const char *text)
{
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	char buffer[2000];

	if (bind(s, (void *)&at, sizeof(at)))
		err(3, "bind");
	for (;;) {
		size_t before = strlen(strcpy(buffer, text));
		struct sockaddr_in from;
		socklen_t size = sizeof(from);
		ssize_t n = recvfrom(s, buffer + before, sizeof(buffer) - before, 0, (void *)&from, &size);

		if (n < 0 || sendto(s, buffer, before + n, 0, (void *)&from, size) < 0)
			err(3, "answer");
	}
}

int main(int argc, char **argv)
{
	int s = socket(AF_INET, SOCK_STREAM, 0), one = 1, status;
	char name[16] = "";
	socklen_t size = sizeof(name);
	struct sockaddr_in at;

	if (argc == 5 && !strcmp(argv[1], "answer"))
		answer(place(argv[2], argv[3]), argv[4]);
	if (argc != 5)
		errx(2, "usage: exchange listen|connect CONTROL ADDRESS PORT");
	at = place(argv[3], argv[4]);
	if (strcmp(argv[2], "-") &&
	    setsockopt(s, IPPROTO_TCP, TCP_CONGESTION, argv[2], strlen(argv[2])))
		err(4, "TCP_CONGESTION %s", argv[2]);
	if (!strcmp(argv[1], "listen")) {
		setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		if (bind(s, (void *)&at, sizeof(at)) || listen(s, 1) || (s = accept(s, NULL, NULL)) < 0)
			err(3, "listen");
	} else if (connect(s, (void *)&at, sizeof(at))) {
		err(3, "connect");
	}
	getsockopt(s, IPPROTO_TCP, TCP_CONGESTION, name, &size);
	fprintf(stderr, "%s\n", name);
	if (!fork()) {
		copy(0, s);
		shutdown(s, SHUT_WR);
		_exit(0);
	}
	copy(s, 1);
	wait(&status);
	return status ? 3 : 0;
}

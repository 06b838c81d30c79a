// SPDX-License-Identifier: GPL-2.0-only
/*
 * One SCTP association:
 *
 *   sctp_talk serve PORT                       takes one in and reads until it ends
 *   sctp_talk send ADDRESS PORT SECONDS [pin]  50 messages of 500 bytes a second; pin: ADDRESS is asked
 *                                              for as the primary path
 *   sctp_talk send ADDRESS PORT SECONDS three  three of 400 bytes at once, each second: while the first is
 *                                              under way Nagle's algorithm puts the others in one packet
 *
 * Both ends are bound to all their addresses.
 */
#include <arpa/inet.h>
#include <err.h>
#include <linux/sctp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static struct sockaddr_in to = { .sin_family = AF_INET };

static void serve(int fd)
{
	char buffer[4096];
	int one;

	if (bind(fd, (void *)&to, sizeof(to)) < 0 || listen(fd, 1) < 0)
		err(1, "port %d", ntohs(to.sin_port));
	one = accept(fd, NULL, NULL);
	if (one < 0)
		err(1, "accept");
	while (recv(one, buffer, sizeof(buffer), 0) > 0)
		;
}

static void send_all(int fd, int seconds, const char *how)
{
	const int pin = !strcmp(how, "pin"), three = !strcmp(how, "three");
	const struct timespec pause = { .tv_sec = three, .tv_nsec = three ? 0 : 20000000 };
	static const char message[500];
	struct sctp_prim primary = {};
	int i, j;

	if (connect(fd, (void *)&to, sizeof(to)) < 0)
		err(1, "connect");
	if (pin) {
		memcpy(&primary.ssp_addr, &to, sizeof(to));
		if (setsockopt(fd, IPPROTO_SCTP, SCTP_PRIMARY_ADDR, &primary, sizeof(primary)) < 0)
			err(1, "SCTP_PRIMARY_ADDR");
	}
	for (i = 0; i < (three ? seconds : seconds * 50); i++) {
		for (j = 0; j < (three ? 3 : 1); j++) {
			if (send(fd, message, three ? 400 : sizeof(message), MSG_NOSIGNAL) < 0)
				err(1, "send");
		}
		nanosleep(&pause, NULL);
	}
}

int main(int argc, char **argv)
{
	int fd = socket(AF_INET, SOCK_STREAM, IPPROTO_SCTP);

	if (fd < 0)
		err(1, "socket");
	if (argc == 3 && !strcmp(argv[1], "serve")) {
		to.sin_port = htons(atoi(argv[2]));
		serve(fd);
	} else if ((argc == 5 || argc == 6) && !strcmp(argv[1], "send")) {
		if (inet_pton(AF_INET, argv[2], &to.sin_addr) != 1)
			errx(2, "not an address: %s", argv[2]);
		to.sin_port = htons(atoi(argv[3]));
		send_all(fd, atoi(argv[4]), argc == 6 ? argv[5] : "");
	} else {
		errx(2, "usage: sctp_talk serve PORT | send ADDRESS PORT SECONDS [pin|three]");
	}
	return 0;
}

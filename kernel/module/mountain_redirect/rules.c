// SPDX-License-Identifier: GPL-2.0-only
/*
 * mountain_redirect: UDP and TCP packets to one address and port go to another one, and replies
 * come from where they were sent to. This file: the rules of each network namespace, how they are
 * set and read by generic netlink (uapi.h), and the module. What happens to a packet is in packet.c.
 *
 * Life of a rule: made and unlinked under mtn_net.lock. Packets find it by two hash tables under
 * RCU, dumps by number, under RCU as well. After it was unlinked it is freed by call_rcu().
 *
 * Life of the hooks: there are some as long as the namespace has rules of their family. They are
 * taken away before the rules are, at the latest by .pre_exit, after which the core waits for a
 * grace period; only then .exit frees what is left, and the module's text may go.
 */
#include <linux/module.h>
#include <linux/slab.h>
#include <net/genetlink.h>
#include <net/ipv6.h>

#include "redirect.h"
#include "uapi.h"

unsigned int mtn_net_id __read_mostly;

static struct genl_family mtn_family;

static unsigned int *mtn_rules_of(struct mtn_net *mn, u8 family)
{
	return family == NFPROTO_IPV4 ? &mn->rules_ipv4 : &mn->rules_ipv6;
}

static void mtn_rule_free(struct mtn_rule *rule)
{
	free_percpu(rule->counters);
	kfree(rule);
}

static void mtn_rule_free_rcu(struct rcu_head *head)
{
	mtn_rule_free(container_of(head, struct mtn_rule, rcu));
}

/* Where nobody can find it any more, after those that have. The caller has the lock. */
static void mtn_rule_unlink(struct net *net, struct mtn_rule *rule)
{
	struct mtn_net *mn = mtn_net(net);
	unsigned int *rules = mtn_rules_of(mn, rule->from.family);

	if (!--*rules)
		mtn_hooks_unregister(net, rule->from.family);
	/* First what brings packets in, then what brings their replies back. */
	rhashtable_remove_fast(&mn->by_from, &rule->by_from, mtn_by_from_params);
	rhashtable_remove_fast(&mn->by_to, &rule->by_to, mtn_by_to_params);
	xa_erase(&mn->by_id, rule->id);
	if (rule->from.ifindex)
		WRITE_ONCE(mn->rules_of_devices, mn->rules_of_devices - 1);
	call_rcu(&rule->rcu, mtn_rule_free_rcu);
}

/* Links @rule, or leaves everything as it was and says why. The caller has the lock. */
static int mtn_rule_link(struct net *net, struct mtn_rule *rule, struct netlink_ext_ack *extack)
{
	struct mtn_net *mn = mtn_net(net);
	unsigned int *rules = mtn_rules_of(mn, rule->from.family);
	int err;

	if (mn->rules_ipv4 + mn->rules_ipv6 >= MTN_REDIRECT_RULES_MAX) {
		NL_SET_ERR_MSG(extack, "too many rules");
		return -E2BIG;
	}
	/* Under the lock nobody else adds any. */
	if (xa_load(&mn->by_id, rule->id)) {
		NL_SET_ERR_MSG(extack, "there is a rule of this number");
		return -EEXIST;
	}
	if (rhashtable_lookup_fast(&mn->by_from, &rule->from, mtn_by_from_params)) {
		NL_SET_ERR_MSG(extack, "there is a rule for this address, port and device");
		return -EEXIST;
	}
	if (rhashtable_lookup_fast(&mn->by_to, &rule->to, mtn_by_to_params)) {
		NL_SET_ERR_MSG(extack,
			       "another rule has this target: replies could not be told apart");
		return -EEXIST;
	}

	err = xa_err(xa_store(&mn->by_id, rule->id, rule, GFP_KERNEL_ACCOUNT));
	if (err)
		return err;
	err = rhashtable_insert_fast(&mn->by_to, &rule->by_to, mtn_by_to_params);
	if (err)
		goto erase;
	err = rhashtable_insert_fast(&mn->by_from, &rule->by_from, mtn_by_from_params);
	if (err)
		goto remove_to;
	if (!*rules) {
		err = mtn_hooks_register(net, rule->from.family);
		if (err)
			goto remove_from;
	}
	++*rules;
	if (rule->from.ifindex)
		WRITE_ONCE(mn->rules_of_devices, mn->rules_of_devices + 1);
	return 0;

remove_from:
	rhashtable_remove_fast(&mn->by_from, &rule->by_from, mtn_by_from_params);
remove_to:
	rhashtable_remove_fast(&mn->by_to, &rule->by_to, mtn_by_to_params);
erase:
	xa_erase(&mn->by_id, rule->id);
	return err;
}

static const struct netlink_range_validation mtn_id_range = {
	.max = MTN_REDIRECT_RULES_MAX - 1,
};

static const struct nla_policy mtn_policy[MTN_REDIRECT_A_MAX + 1] = {
	[MTN_REDIRECT_A_ID] = NLA_POLICY_FULL_RANGE(NLA_U32, &mtn_id_range),
	[MTN_REDIRECT_A_PROTO] = { .type = NLA_U8 },
	[MTN_REDIRECT_A_FROM] = NLA_POLICY_RANGE(NLA_BINARY, sizeof(struct in_addr),
						 sizeof(struct in6_addr)),
	[MTN_REDIRECT_A_FROM_PORT] = { .type = NLA_BE16 },
	[MTN_REDIRECT_A_TO] = NLA_POLICY_RANGE(NLA_BINARY, sizeof(struct in_addr),
					       sizeof(struct in6_addr)),
	[MTN_REDIRECT_A_TO_PORT] = { .type = NLA_BE16 },
	[MTN_REDIRECT_A_IFINDEX] = NLA_POLICY_MIN(NLA_S32, 1),
};

/* Puts address and port of two attributes into @end. */
static int mtn_get_end(struct genl_info *info, int address, int port, struct mtn_end *end)
{
	const struct nlattr *nla;

	if (GENL_REQ_ATTR_CHECK(info, address) || GENL_REQ_ATTR_CHECK(info, port))
		return -EINVAL;
	nla = info->attrs[address];
	switch (nla_len(nla)) {
	case sizeof(struct in_addr):
		end->family = NFPROTO_IPV4;
		end->addr.ip = nla_get_in_addr(nla);
		if (ipv4_is_multicast(end->addr.ip) || ipv4_is_lbcast(end->addr.ip) ||
		    ipv4_is_zeronet(end->addr.ip) || ipv4_is_loopback(end->addr.ip))
			break;
		goto check_port;
	case sizeof(struct in6_addr):
		end->family = NFPROTO_IPV6;
		end->addr.in6 = nla_get_in6_addr(nla);
		if (ipv6_addr_is_multicast(&end->addr.in6) || ipv6_addr_any(&end->addr.in6) ||
		    ipv6_addr_loopback(&end->addr.in6) ||
		    ipv6_addr_type(&end->addr.in6) & IPV6_ADDR_LINKLOCAL)
			break;
		goto check_port;
	default:
		NL_SET_ERR_MSG_ATTR(info->extack, nla, "an address has 4 or 16 bytes");
		return -EINVAL;
	}
	NL_SET_ERR_MSG_ATTR(info->extack, nla,
			    "not an address of one host that others can reach");
	return -EINVAL;

check_port:
	end->port = nla_get_be16(info->attrs[port]);
	if (!end->port) {
		NL_SET_ERR_MSG_ATTR(info->extack, info->attrs[port], "there is no port 0");
		return -EINVAL;
	}
	return 0;
}

static int mtn_get_rule(struct genl_info *info, struct mtn_rule *rule)
{
	u8 proto;
	int err;

	if (GENL_REQ_ATTR_CHECK(info, MTN_REDIRECT_A_ID) ||
	    GENL_REQ_ATTR_CHECK(info, MTN_REDIRECT_A_PROTO))
		return -EINVAL;
	rule->id = nla_get_u32(info->attrs[MTN_REDIRECT_A_ID]);
	proto = nla_get_u8(info->attrs[MTN_REDIRECT_A_PROTO]);
	if (proto != IPPROTO_UDP && proto != IPPROTO_TCP) {
		NL_SET_ERR_MSG_ATTR(info->extack, info->attrs[MTN_REDIRECT_A_PROTO],
				    "only UDP and TCP are redirected");
		return -EINVAL;
	}
	err = mtn_get_end(info, MTN_REDIRECT_A_FROM, MTN_REDIRECT_A_FROM_PORT, &rule->from);
	if (err)
		return err;
	err = mtn_get_end(info, MTN_REDIRECT_A_TO, MTN_REDIRECT_A_TO_PORT, &rule->to);
	if (err)
		return err;
	if (rule->from.family != rule->to.family) {
		NL_SET_ERR_MSG(info->extack, "from IPv4 to IPv6, or back, is no redirection");
		return -EINVAL;
	}
	rule->from.proto = proto;
	rule->to.proto = proto;
	if (info->attrs[MTN_REDIRECT_A_IFINDEX]) {
		rule->from.ifindex = nla_get_s32(info->attrs[MTN_REDIRECT_A_IFINDEX]);
		rule->to.ifindex = rule->from.ifindex;
	}
	if (!memcmp(&rule->from, &rule->to, sizeof(rule->from))) {
		NL_SET_ERR_MSG(info->extack, "from and to are the same");
		return -EINVAL;
	}
	return 0;
}

static int mtn_cmd_new(struct sk_buff *skb, struct genl_info *info)
{
	struct net *net = genl_info_net(info);
	struct mtn_net *mn = mtn_net(net);
	struct mtn_rule *rule;
	int err;

	rule = kzalloc(sizeof(*rule), GFP_KERNEL_ACCOUNT);
	if (!rule)
		return -ENOMEM;
	err = mtn_get_rule(info, rule);
	if (err)
		goto free;
	rule->counters = alloc_percpu_gfp(struct mtn_counters, GFP_KERNEL_ACCOUNT);
	if (!rule->counters) {
		err = -ENOMEM;
		goto free;
	}
	mutex_lock(&mn->lock);
	err = mtn_rule_link(net, rule, info->extack);
	mutex_unlock(&mn->lock);
	if (!err)
		return 0;
	/* A packet or a dump may have found it before it was taken back. */
	call_rcu(&rule->rcu, mtn_rule_free_rcu);
	return err;

free:
	kfree(rule);
	return err;
}

static int mtn_cmd_del(struct sk_buff *skb, struct genl_info *info)
{
	struct net *net = genl_info_net(info);
	struct mtn_net *mn = mtn_net(net);
	struct mtn_rule *rule;
	unsigned long id;
	int err = 0;

	mutex_lock(&mn->lock);
	if (info->attrs[MTN_REDIRECT_A_ID]) {
		rule = xa_load(&mn->by_id, nla_get_u32(info->attrs[MTN_REDIRECT_A_ID]));
		if (rule)
			mtn_rule_unlink(net, rule);
		else
			err = -ENOENT;
	} else {
		xa_for_each(&mn->by_id, id, rule)
			mtn_rule_unlink(net, rule);
	}
	mutex_unlock(&mn->lock);
	return err;
}

static int mtn_put_end(struct sk_buff *skb, const struct mtn_end *end, int address, int port)
{
	int err;

	if (end->family == NFPROTO_IPV4)
		err = nla_put_in_addr(skb, address, end->addr.ip);
	else
		err = nla_put_in6_addr(skb, address, &end->addr.in6);
	return err ?: nla_put_be16(skb, port, end->port);
}

static int mtn_put_counters(struct sk_buff *skb, const struct mtn_rule *rule)
{
	struct mtn_counters sum = {};
	int cpu, i;

	for_each_possible_cpu(cpu) {
		const struct mtn_counters *counters = per_cpu_ptr(rule->counters, cpu);

		for (i = 0; i < MTN_DIRECTIONS; i++) {
			sum.packets[i] += READ_ONCE(counters->packets[i]);
			sum.bytes[i] += READ_ONCE(counters->bytes[i]);
		}
		sum.no_memory += READ_ONCE(counters->no_memory);
	}
	if (nla_put_u64_64bit(skb, MTN_REDIRECT_A_FORWARD_PACKETS, sum.packets[MTN_FORWARD],
			      MTN_REDIRECT_A_PAD) ||
	    nla_put_u64_64bit(skb, MTN_REDIRECT_A_FORWARD_BYTES, sum.bytes[MTN_FORWARD],
			      MTN_REDIRECT_A_PAD) ||
	    nla_put_u64_64bit(skb, MTN_REDIRECT_A_REPLY_PACKETS, sum.packets[MTN_REPLY],
			      MTN_REDIRECT_A_PAD) ||
	    nla_put_u64_64bit(skb, MTN_REDIRECT_A_REPLY_BYTES, sum.bytes[MTN_REPLY],
			      MTN_REDIRECT_A_PAD) ||
	    nla_put_u64_64bit(skb, MTN_REDIRECT_A_DROPS_MEMORY, sum.no_memory,
			      MTN_REDIRECT_A_PAD))
		return -EMSGSIZE;
	return 0;
}

static int mtn_put_rule(struct sk_buff *skb, struct netlink_callback *cb,
			const struct mtn_rule *rule)
{
	void *header;

	header = genlmsg_put(skb, NETLINK_CB(cb->skb).portid, cb->nlh->nlmsg_seq, &mtn_family,
			     NLM_F_MULTI, MTN_REDIRECT_CMD_NEW);
	if (!header)
		return -EMSGSIZE;
	if (nla_put_u32(skb, MTN_REDIRECT_A_ID, rule->id) ||
	    nla_put_u8(skb, MTN_REDIRECT_A_PROTO, rule->from.proto) ||
	    mtn_put_end(skb, &rule->from, MTN_REDIRECT_A_FROM, MTN_REDIRECT_A_FROM_PORT) ||
	    mtn_put_end(skb, &rule->to, MTN_REDIRECT_A_TO, MTN_REDIRECT_A_TO_PORT) ||
	    (rule->from.ifindex &&
	     nla_put_s32(skb, MTN_REDIRECT_A_IFINDEX, rule->from.ifindex)) ||
	    mtn_put_counters(skb, rule)) {
		genlmsg_cancel(skb, header);
		return -EMSGSIZE;
	}
	genlmsg_end(skb, header);
	return 0;
}

/* As many as fit; cb->args[0] is the number to go on from. */
static int mtn_cmd_get(struct sk_buff *skb, struct netlink_callback *cb)
{
	struct mtn_net *mn = mtn_net(sock_net(skb->sk));
	const struct mtn_rule *rule;
	unsigned long id;
	int err = 0;

	rcu_read_lock();
	xa_for_each_start(&mn->by_id, id, rule, cb->args[0]) {
		err = mtn_put_rule(skb, cb, rule);
		if (err)
			break;
		cb->args[0] = id + 1;
	}
	rcu_read_unlock();
	/* What did not fit is for the next message, but something must have. */
	return err && !skb->len ? err : skb->len;
}

static const struct genl_small_ops mtn_ops[] = {
	{
		.cmd = MTN_REDIRECT_CMD_NEW,
		.doit = mtn_cmd_new,
		.flags = GENL_UNS_ADMIN_PERM,
	},
	{
		.cmd = MTN_REDIRECT_CMD_DEL,
		.doit = mtn_cmd_del,
		.flags = GENL_UNS_ADMIN_PERM,
	},
	{
		.cmd = MTN_REDIRECT_CMD_GET,
		.dumpit = mtn_cmd_get,
		.flags = GENL_UNS_ADMIN_PERM,
	},
};

static struct genl_family mtn_family __ro_after_init = {
	.name = MTN_REDIRECT_FAMILY,
	.version = MTN_REDIRECT_VERSION,
	.maxattr = MTN_REDIRECT_A_MAX,
	.policy = mtn_policy,
	.netnsok = true,
	.parallel_ops = true,	/* mtn_net.lock */
	.module = THIS_MODULE,
	.small_ops = mtn_ops,
	.n_small_ops = ARRAY_SIZE(mtn_ops),
};

static int __net_init mtn_net_init(struct net *net)
{
	struct mtn_net *mn = mtn_net(net);
	int err;

	mutex_init(&mn->lock);
	xa_init(&mn->by_id);
	err = rhashtable_init(&mn->by_from, &mtn_by_from_params);
	if (err)
		return err;
	err = rhashtable_init(&mn->by_to, &mtn_by_to_params);
	if (err)
		rhashtable_destroy(&mn->by_from);
	return err;
}

/* The namespace ends, or the module: netlink does not come here any more. */
static void __net_exit mtn_net_pre_exit(struct net *net)
{
	struct mtn_net *mn = mtn_net(net);

	if (mn->rules_ipv4)
		mtn_hooks_unregister(net, NFPROTO_IPV4);
	if (mn->rules_ipv6)
		mtn_hooks_unregister(net, NFPROTO_IPV6);
}

/* A grace period later: no packet is in the hooks. */
static void __net_exit mtn_net_exit(struct net *net)
{
	struct mtn_net *mn = mtn_net(net);
	struct mtn_rule *rule;
	unsigned long id;

	rhashtable_destroy(&mn->by_from);
	rhashtable_destroy(&mn->by_to);
	xa_for_each(&mn->by_id, id, rule)
		mtn_rule_free(rule);
	xa_destroy(&mn->by_id);
}

static struct pernet_operations mtn_net_ops = {
	.init = mtn_net_init,
	.pre_exit = mtn_net_pre_exit,
	.exit = mtn_net_exit,
	.id = &mtn_net_id,
	.size = sizeof(struct mtn_net),
};

static int __init mtn_init(void)
{
	int err;

	/* Keys are compared as bytes. */
	BUILD_BUG_ON(sizeof(struct mtn_end) != sizeof(union nf_inet_addr) + 8);

	err = register_pernet_subsys(&mtn_net_ops);
	if (err)
		return err;
	err = genl_register_family(&mtn_family);
	if (err)
		unregister_pernet_subsys(&mtn_net_ops);
	return err;
}

static void __exit mtn_exit(void)
{
	genl_unregister_family(&mtn_family);
	unregister_pernet_subsys(&mtn_net_ops);
	/* mtn_rule_free_rcu() is in this module. */
	rcu_barrier();
}

module_init(mtn_init);
module_exit(mtn_exit);

MODULE_AUTHOR("Mountain developers <mountain@example.org>");
MODULE_DESCRIPTION("Redirects UDP and TCP from one address and port to another");
MODULE_ALIAS_GENL_FAMILY(MTN_REDIRECT_FAMILY);
MODULE_LICENSE("GPL");
